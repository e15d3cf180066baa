// The types half and bfloat16_t: their storage, and conversions that round to nearest even. They have no
// arithmetic, because the scalar unit of a vector core has none on them.
#pragma once

#include <cstdint>

#include "op_kernels/common/convert.h"

struct half {
  half() = default;
  half(float value)
      : bits(rec_sdk::REC_SDK_ISA::Float16::store(value)) {}  // implicit conversion, as in bisheng
  explicit operator float() const { return rec_sdk::REC_SDK_ISA::Float16::load(bits); }

  uint16_t bits;
};

struct bfloat16_t {
  bfloat16_t() = default;
  explicit bfloat16_t(float value) : bits(rec_sdk::REC_SDK_ISA::BFloat16::store(value)) {}
  explicit operator float() const { return rec_sdk::REC_SDK_ISA::BFloat16::load(bits); }

  uint16_t bits;
};

static_assert(sizeof(half) == 2 && sizeof(bfloat16_t) == 2, "stored as 16 bits");

namespace AscendC {

inline float ToFloat(const bfloat16_t& value) { return static_cast<float>(value); }
inline bfloat16_t ToBfloat16(const float& value) { return bfloat16_t(value); }

}  // namespace AscendC
