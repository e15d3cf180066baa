// Indices for Gather with a constant step. The scalar unit writes the first UB block. Once the vector unit
// may read that block, it computes the other blocks from it.
#pragma once

#include "op_kernels/common/ascendc/signal.h"

namespace rec_sdk {
namespace ascendc {

constexpr int64_t kFirstSteps = kUbBlock / sizeof(int32_t);

// Writes to[i] = i * step, i < kFirstSteps. Engine: scalar unit.
__aicore__ inline void begin_steps(const LocalTensor<int32_t>& to, int64_t step) {
  for (int64_t i = 0; i < kFirstSteps; ++i) {
    to.SetValue(static_cast<uint32_t>(i), static_cast<int32_t>(i * step));
  }
}

// Writes the remaining steps up to `count`. Engine: vector unit.
__aicore__ inline void continue_steps(const LocalTensor<int32_t>& to, int64_t count, int64_t step) {
  for (int64_t n = kFirstSteps; n < count; n *= 2) {
    AscendC::Adds(to[static_cast<uint32_t>(n)], to, static_cast<int32_t>(n * step),
                  static_cast<int32_t>(minimum(n, count - n)));
    vector_barrier();
  }
}

}  // namespace ascendc
}  // namespace rec_sdk
