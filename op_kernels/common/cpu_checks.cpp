#include <cstdint>

#include "op_kernels/common/isa.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

uint32_t largest(const int32_t* values, int64_t begin, int64_t end) {
  uint32_t found = 0;
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t value = static_cast<uint32_t>(values[i]);
    found = value > found ? value : found;
  }
  return found;
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
