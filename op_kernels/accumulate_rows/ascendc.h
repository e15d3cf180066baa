// accumulate_rows for arch 2201: the tiles of update_rows, with a compensated sum as the optimizer.
#pragma once

#include "op_kernels/accumulate_rows/two_sum.h"
#include "op_kernels/common/ascendc/update_tiles.h"

namespace rec_sdk {
namespace ascendc {

struct Accumulate : REC_SDK_ISA::ElementwiseOptimizer {
  static constexpr int kElementStates = 1;  // compensation

  __aicore__ inline explicit constexpr Accumulate(const float*) {}

  template <class T>
  __aicore__ inline constexpr void element(T& sum, T* states, const T& g, REC_SDK_ISA::NoValues) const {
    REC_SDK_ISA::two_sum(sum, states[0], g);
  }
};

__aicore__ inline void accumulate_rows(TPipe* pipe, const AccumulateRows& a, const HotWorkspace& workspace) {
  forget_cached(a.segments.offsets);
  RowsToUpdate rows{};
  rows.segments = a.segments;
  rows.records = reinterpret_cast<uint8_t*>(a.pending);
  rows.shape = {a.segments.dim, a.segments.dim * 8, FloatWeights::kBytes, 1, 0, a.segments.dim * 4, 0};
  rows.tables = {nullptr, 1, nullptr};
  rows.workspace = workspace;
  UpdateTiles<Accumulate, FloatWeights> tiles;
  tiles.run(pipe, rows);
}

}  // namespace ascendc
}  // namespace rec_sdk
