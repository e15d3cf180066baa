// The implementation for the host of the AscendC calls that this project's kernels use. The header has the
// name of CANN's header, so that bisheng and g++ compile the same source. engine/ contains the checks.
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
