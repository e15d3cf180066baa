// Vector instructions on one number of floats. An instruction that is given its count sets the mask before it
// and puts it back after it, six instructions of the scalar unit; here the mask is set once for many.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

// Between begin() and end() no other vector instruction may be issued.
class OneMask {
 public:
  __aicore__ inline static void begin(int64_t count) {
    AscendC::SetMaskCount();
    AscendC::SetVectorMask<float, AscendC::MaskMode::COUNTER>(static_cast<int32_t>(count));
  }
  __aicore__ inline static void end() {
    AscendC::SetMaskNorm();
    AscendC::ResetMask();
  }

  __aicore__ inline static void add(const LocalTensor<float>& to, const LocalTensor<float>& a,
                                    const LocalTensor<float>& b) {
    AscendC::Add<float, false>(to, a, b, AscendC::MASK_PLACEHOLDER, 1, {1, 1, 1, 8, 8, 8});
  }
  __aicore__ inline static void multiply(const LocalTensor<float>& to, const LocalTensor<float>& a,
                                         const LocalTensor<float>& b) {
    AscendC::Mul<float, false>(to, a, b, AscendC::MASK_PLACEHOLDER, 1, {1, 1, 1, 8, 8, 8});
  }
  __aicore__ inline static void scale(const LocalTensor<float>& values, float by) {
    scale_to(values, values, by);
  }
  __aicore__ inline static void scale_to(const LocalTensor<float>& to, const LocalTensor<float>& values,
                                         float by) {
    AscendC::Muls<float, false>(to, values, by, 1);
  }
  // As copy_values().
  __aicore__ inline static void copy(const LocalTensor<float>& to, const LocalTensor<float>& from) {
    AscendC::Adds<int32_t, false>(to.ReinterpretCast<int32_t>(), from.ReinterpretCast<int32_t>(), 0, 1);
  }
};

}  // namespace ascendc
}  // namespace rec_sdk
