// The host implementation of the calls of AscendC that the kernels of this project use, under CANN's name, so
// that the same source compiles with CANN's bisheng and here. See engine/ for what checks them.
#pragma once

#include "torch_npu_ext/emulator/ascendc/api/allocator.h"
#include "torch_npu_ext/emulator/ascendc/api/atomics.h"
#include "torch_npu_ext/emulator/ascendc/api/cache.h"
#include "torch_npu_ext/emulator/ascendc/api/cast.h"
#include "torch_npu_ext/emulator/ascendc/api/copies.h"
#include "torch_npu_ext/emulator/ascendc/api/flags.h"
#include "torch_npu_ext/emulator/ascendc/api/language.h"
#include "torch_npu_ext/emulator/ascendc/api/queues.h"
#include "torch_npu_ext/emulator/ascendc/api/saturation.h"
#include "torch_npu_ext/emulator/ascendc/api/sync_all.h"
#include "torch_npu_ext/emulator/ascendc/api/tensors.h"
#include "torch_npu_ext/emulator/ascendc/api/types.h"
#include "torch_npu_ext/emulator/ascendc/api/vector.h"
