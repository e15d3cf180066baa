// The host implementation of the AscendC calls that this project's kernels use, under CANN's name, so that
// the same source compiles with CANN's bisheng and here. engine/ contains the checks.
#pragma once

#include "emulator/ascendc/api/allocator.h"
#include "emulator/ascendc/api/atomics.h"
#include "emulator/ascendc/api/cache.h"
#include "emulator/ascendc/api/cast.h"
#include "emulator/ascendc/api/copies.h"
#include "emulator/ascendc/api/flags.h"
#include "emulator/ascendc/api/language.h"
#include "emulator/ascendc/api/queues.h"
#include "emulator/ascendc/api/saturation.h"
#include "emulator/ascendc/api/sync_all.h"
#include "emulator/ascendc/api/tensors.h"
#include "emulator/ascendc/api/types.h"
#include "emulator/ascendc/api/vector.h"
