// How numbers that are too large for 16 bits convert. By default A2 and A3 saturate: infinity becomes the
// largest number and NaN becomes 0, which would hide a diverged training. IEEE keeps both, as the host does.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

class IeeeConversions {
 public:
  __aicore__ inline void start() {
    saturated_ = AscendC::GetSaturationFlag<AscendC::SaturationMode::FLOAT>();
    AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(false);
  }
  // The register outlives the kernel.
  __aicore__ inline void finish() { AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(saturated_); }

 private:
  bool saturated_;
};

}  // namespace ascendc
}  // namespace rec_sdk
