// The cores of a launch: the index of the running core, their number, and the synchronization of all cores.
#pragma once

#include "emulator/ascendc/api/tensors.h"

namespace AscendC {

inline int64_t GetBlockIdx() { return rec_sdk::emulator::block_index(); }
inline int64_t GetBlockNum() { return rec_sdk::emulator::block_count(); }
// Always 0, because there are only vector cores.
inline int64_t GetSubBlockIdx() { return 0; }
inline int64_t GetTaskRatio() { return 1; }
inline int64_t GetTaskRation() { return 1; }

// Synchronizes all cores in hardware. For an NPU the kernel must be declared __mix__(0, 1).
template <bool isAIVOnly = true>
void SyncAll() {
  static_assert(isAIVOnly, "SyncAll: the emulated kernels have no cube cores to wait for");
  rec_sdk::emulator::sync_all("SyncAll");
}

// Synchronizes all cores in software, with workspaces of 32 bytes per core. The workspace in global memory
// must be zeroed before the launch.
template <bool isAIVOnly = true>
void SyncAll(const GlobalTensor<int32_t>& gmWorkspace, const LocalTensor<int32_t>& ubWorkspace,
             const int32_t usedCores = 0) {
  static_assert(isAIVOnly, "SyncAll: the emulated kernels have no cube cores to wait for");
  rec_sdk::emulator::sync_all_soft(gmWorkspace.memory(), ubWorkspace.memory(), usedCores);
}

}  // namespace AscendC
