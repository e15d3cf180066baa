// Conversions between types on the vector unit.
#pragma once

#include "emulator/ascendc/api/saturation.h"
#include "emulator/ascendc/api/tensors.h"
#include "emulator/ascendc/engine/elementwise.h"

namespace AscendC {

enum class RoundMode : uint8_t {
  CAST_NONE = 0,
  CAST_RINT,
  CAST_FLOOR,
  CAST_CEIL,
  CAST_ROUND,
  CAST_TRUNC,
  CAST_ODD,
};

// The kind of conversion of a pair of types. kExact allows only CAST_NONE. kNearest rounds to the nearest
// value of T; the emulator implements only CAST_RINT for it. kWhole rounds to an integer, in any mode except
// CAST_NONE and CAST_ODD.
enum class CastKind { kAbsent, kExact, kNearest, kWhole };

template <typename T, typename U>
constexpr CastKind cast_kind() {
  using K = CastKind;
  if constexpr (kOneOf<T, float>) {
    return kOneOf<U, half, bfloat16_t, int16_t> ? K::kExact
           : kOneOf<U, int32_t, int64_t>        ? K::kNearest
           : kOneOf<U, float>                   ? K::kWhole
                                                : K::kAbsent;
  } else if constexpr (kOneOf<T, half>) {
    return kOneOf<U, float, int16_t> ? K::kNearest : K::kAbsent;
  } else if constexpr (kOneOf<T, bfloat16_t>) {
    return kOneOf<U, float> ? K::kNearest : K::kAbsent;
  } else if constexpr (kOneOf<T, int16_t>) {
    return kOneOf<U, int32_t> ? K::kExact : kOneOf<U, float, half> ? K::kWhole : K::kAbsent;
  } else if constexpr (kOneOf<T, int32_t>) {
    return kOneOf<U, int64_t> ? K::kExact : kOneOf<U, float, half, bfloat16_t> ? K::kWhole : K::kAbsent;
  } else if constexpr (kOneOf<T, int64_t>) {
    return kOneOf<U, int32_t> ? K::kExact : kOneOf<U, float> ? K::kWhole : K::kAbsent;
  }
  return K::kAbsent;
}

// Returns the conversion function for a rounding mode; null if the pair of types does not support the mode.
template <typename T, typename U>
rec_sdk::emulator::ElementFunction cast_function(RoundMode mode) {
  using namespace rec_sdk::emulator;
  constexpr CastKind kKind = cast_kind<T, U>();
  if constexpr (kKind == CastKind::kExact) {
    return mode == RoundMode::CAST_NONE ? cast<T, U, Rounding::kNone> : nullptr;
  } else if constexpr (kKind == CastKind::kNearest) {
    const bool half_none = mode == RoundMode::CAST_NONE && kOneOf<T, half>;
    return mode == RoundMode::CAST_RINT || half_none ? cast<T, U, Rounding::kRint> : nullptr;
  } else if constexpr (kKind == CastKind::kWhole) {
    switch (mode) {
      case RoundMode::CAST_RINT:
        return cast<T, U, Rounding::kRint>;
      case RoundMode::CAST_FLOOR:
        return cast<T, U, Rounding::kFloor>;
      case RoundMode::CAST_CEIL:
        return cast<T, U, Rounding::kCeil>;
      case RoundMode::CAST_ROUND:
        return cast<T, U, Rounding::kRound>;
      case RoundMode::CAST_TRUNC:
        return cast<T, U, Rounding::kTrunc>;
      default:
        return nullptr;
    }
  }
  return nullptr;
}

template <typename T, typename U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode,
          const uint32_t count) {
  static_assert(cast_kind<T, U>() != CastKind::kAbsent,
                "Cast: this pair of types does not exist on this chip");
  rec_sdk::emulator::VectorCall call = vector_call("Cast", dst, count);
  call.function = cast_function<T, U>(roundMode);
  call.a = &src.memory();
  call.src_bytes = sizeof(U);
  rec_sdk::emulator::run_vector(call);
}

}  // namespace AscendC
