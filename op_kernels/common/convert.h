// Storage formats of the weights. Conversions are arithmetic on bits, which compilers vectorize and whose
// results are bit-identical on every platform. store(value) rounds to nearest, ties to even. store(value,
// random) rounds up or down by the upper bits of `random`, so that it is unbiased; magnitudes beyond the
// largest finite number are rounded to nearest, so that none becomes infinite by chance.
#pragma once

#include <cstdint>
#include <cstring>

#include "op_kernels/common/isa.h"
#include "op_kernels/common/record.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

REC_SDK_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

REC_SDK_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// Returns all ones if a < b, else zero; a and b must be below 2^31. Written without a condition, which GCC
// would compile to a branch here.
REC_SDK_HD uint32_t mask_less(uint32_t a, uint32_t b) { return 0u - ((a - b) >> 31); }
REC_SDK_HD uint32_t select(uint32_t mask, uint32_t ones, uint32_t zeros) {
  return zeros ^ ((zeros ^ ones) & mask);
}

struct Float32 {
  using Storage = float;
  static constexpr bool kRounds = false;
  static REC_SDK_HD float load(float stored) { return stored; }
  static REC_SDK_HD float store(float value) { return value; }
  static REC_SDK_HD float store(float value, uint32_t) { return value; }
};

struct BFloat16 {
  using Storage = uint16_t;
  static constexpr bool kRounds = true;
  static constexpr uint32_t kLargest = 0x7f7f0000u;
  static REC_SDK_HD float load(uint16_t stored) { return float_of(static_cast<uint32_t>(stored) << 16); }
  static REC_SDK_HD uint16_t store(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // rounds to nearest even
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
  static REC_SDK_HD uint16_t store(float value, uint32_t random) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    const uint32_t to_nearest = 0x7fffu + ((bits >> 16) & 1u);
    const uint32_t added = select(mask_less(kLargest, magnitude), to_nearest, random >> 16);
    return static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7fc0u : (bits + added) >> 16);
  }
};

// After F. Giesen, "Float->half variants": subnormals are converted with one float addition, which is exact
// or correctly rounded. All other numbers add zero there, because a conditional addition would be a branch,
// and the compiler would not vectorize the loop around it.
struct Float16 {
  using Storage = uint16_t;
  static constexpr bool kRounds = true;
  static constexpr uint32_t kLargest = 0x477fe000u;  // 65504
  static constexpr uint32_t kSmallest = 113u << 23;  // 2^-14, the smallest normal number
  static constexpr float kSubnormalUnits = 0x1p37f;  // number of units of 2^-24 / 2^13 in 1
  static REC_SDK_HD float load(uint16_t stored) {
    const uint32_t magnitude = (stored & 0x7fffu) << 13;
    const uint32_t exponent = magnitude & 0x0f800000u;
    const uint32_t subnormal = mask_less(exponent, 1);
    const uint32_t rebased = magnitude + (112u << 23) + (subnormal & (1u << 23));
    const uint32_t finite = bits_of(float_of(rebased) - float_of(subnormal & (113u << 23)));
    const uint32_t bits = exponent == 0x0f800000u ? finite + (112u << 23) : finite;
    return float_of(bits | ((stored & 0x8000u) << 16));
  }
  static REC_SDK_HD uint16_t store(float value) {
    constexpr uint32_t kHalf = 0x3f000000u;  // 0.5; its ulp is 2^-24, as for subnormals of fp16
    const uint32_t all = bits_of(value);
    const uint32_t magnitude = all & 0x7fffffffu;
    const uint32_t subnormal = mask_less(magnitude, 113u << 23);
    const uint32_t bits = bits_of(float_of(magnitude) + float_of(subnormal & kHalf));
    const uint32_t normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    const uint32_t finite = select(subnormal, bits - kHalf, normal);
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t rounded = select(mask_less(magnitude, 143u << 23), finite, special);
    return static_cast<uint16_t>(rounded | ((all >> 16) & 0x8000u));
  }
  static REC_SDK_HD uint16_t store(float value, uint32_t random) {
    const uint32_t all = bits_of(value), magnitude = all & 0x7fffffffu, added = random >> 19;
    const uint32_t subnormal = mask_less(magnitude, kSmallest);
    const auto units = static_cast<int32_t>(float_of(magnitude & subnormal) * kSubnormalUnits);
    const uint32_t normal = magnitude - (112u << 23);
    const uint32_t rounded = (select(subnormal, static_cast<uint32_t>(units), normal) + added) >> 13;
    const uint32_t infinite = select(mask_less(magnitude, 0x477ff000u), 0x7bffu, 0x7c00u);
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : infinite;
    const uint32_t result = select(mask_less(kLargest, magnitude), special, rounded);
    return static_cast<uint16_t>(result | ((all >> 16) & 0x8000u));
  }
};

// Calls f(Format{}), where Format is the storage format of a dtype.
template <class F>
REC_SDK_INLINE void with_format(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(Float32{});
    case DType::kFloat16:
      return f(Float16{});
    case DType::kBFloat16:
      return f(BFloat16{});
  }
}

template <int64_t kValue>
struct Constant {
  static constexpr int64_t value = kValue;
};

// Calls f(Constant<dim>{}) for common widths, whose loops are then unrolled, and f(Constant<0>{}) for any
// other width.
template <class F>
REC_SDK_INLINE void with_dim(int64_t dim, const F& f) {
  switch (dim) {
    case 32:
      return f(Constant<32>{});
    case 64:
      return f(Constant<64>{});
    case 128:
      return f(Constant<128>{});
    default:
      return f(Constant<0>{});
  }
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
