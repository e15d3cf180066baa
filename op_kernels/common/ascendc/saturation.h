// How numbers that are too large for 16 bits convert. While bit 48 of a core's control register is 0,
// infinity becomes the largest number and NaN becomes 0, which would hide a diverged training; at 1, both
// stay what they are, as on the host. CANN's documents disagree about how it starts, so it is set, and put
// back.
//
// By the compiler's own functions, which CANN 8.5 has as well, for A2, A3 and 950: SetSaturationFlag came
// with 9.1, for A2 and A3 only, and SetCtrlSpr knows these with 9.1.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

class IeeeConversions {
 public:
  __aicore__ inline void start() {
    before_ = control() & kKeepsInfinity;
    set_ctrl(control() | kKeepsInfinity);
  }
  // The register outlives the kernel.
  __aicore__ inline void finish() { set_ctrl((control() & ~kKeepsInfinity) | before_); }

 private:
  static constexpr uint64_t kKeepsInfinity = uint64_t{1} << 48;

  __aicore__ inline static uint64_t control() { return static_cast<uint64_t>(get_ctrl()); }

  uint64_t before_;
};

}  // namespace ascendc
}  // namespace rec_sdk
