// Sets a core's control register so that results beyond the range of a type equal the host's results, and
// restores the register at the end.
//
// Numbers too large for 16 bits: while bit 48 is 0, infinity becomes the largest number and NaN becomes 0,
// which would hide a diverged training; while it is 1, both are kept. CANN's documents disagree about its
// initial value. On 950 it has an effect only while bit 60 is 1, and bit 53 makes integers saturate, whereas
// stochastic rounding relies on the low bits of products and sums.
//
// Uses the compiler's built-in functions, which exist since CANN 8.5 for A2, A3 and 950: SetSaturationFlag
// was added in 9.1 for A2 and A3 only, and SetCtrlSpr supports these bits since 9.1.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

class HostArithmetic {
 public:
  __aicore__ inline void start() {
    before_ = control() & kBits;
    set_ctrl((control() & ~kBits) | kAsOnHost);
  }
  // Restores the register, because its value persists after the kernel.
  __aicore__ inline void finish() { set_ctrl((control() & ~kBits) | before_); }

 private:
  static constexpr uint64_t kKeepsInfinity = uint64_t{1} << 48;
#if defined(__NPU_ARCH__) && __NPU_ARCH__ == 3510
  static constexpr uint64_t kIntegersSaturate = uint64_t{1} << 53, kForAllOfCore = uint64_t{1} << 60;
  static constexpr uint64_t kBits = kKeepsInfinity | kIntegersSaturate | kForAllOfCore;
  static constexpr uint64_t kAsOnHost = kKeepsInfinity | kForAllOfCore;
#else
  static constexpr uint64_t kBits = kKeepsInfinity, kAsOnHost = kKeepsInfinity;
#endif

  __aicore__ inline static uint64_t control() { return static_cast<uint64_t>(get_ctrl()); }

  uint64_t before_;
};

}  // namespace ascendc
}  // namespace rec_sdk
