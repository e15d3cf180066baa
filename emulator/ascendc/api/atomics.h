// Atomic copies: copies out of local memory that combine their values with the contents of global memory. All
// copies out between SetAtomicAdd(), SetAtomicMax() or SetAtomicMin() and SetAtomicNone() are atomic. The
// order in which cores combine their values is not fixed.
#pragma once

#include "emulator/ascendc/api/tensors.h"

namespace AscendC {

template <typename T>
constexpr bool kAtomicType = kOneOf<T, int8_t, int16_t, half, bfloat16_t, int32_t, float>;

// Adds two values. 16-bit floats are added in float, integers in their own type.
template <typename T>
T added(T a, T b) {
  if constexpr (kOneOf<T, half, bfloat16_t>) {
    return T(static_cast<float>(a) + static_cast<float>(b));
  } else {
    return static_cast<T>(a + b);
  }
}

template <typename T>
bool less(T a, T b) {
  if constexpr (kOneOf<T, half, bfloat16_t>) {
    return static_cast<float>(a) < static_cast<float>(b);
  } else {
    return a < b;
  }
}

enum class Combine { kAdd, kMax, kMin };

template <typename T, Combine how>
void combine(void* gm, const void* ub, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += sizeof(T)) {
    T old, given;
    std::memcpy(&old, static_cast<char*>(gm) + at, sizeof(T));
    std::memcpy(&given, static_cast<const char*>(ub) + at, sizeof(T));
    const T result = how == Combine::kAdd   ? added(old, given)
                     : how == Combine::kMax ? (less(old, given) ? given : old)
                                            : (less(given, old) ? given : old);
    std::memcpy(static_cast<char*>(gm) + at, &result, sizeof(T));
  }
}

template <typename T>
void SetAtomicAdd() {
  static_assert(kAtomicType<T>,
                "SetAtomicAdd: int8, int16, half, bfloat16, int32 and float only, no 64-bit type");
  rec_sdk::emulator::set_atomic("SetAtomicAdd", &rec_sdk::emulator::kTypeTag<T>, combine<T, Combine::kAdd>);
}

template <typename T>
void SetAtomicMax() {
  static_assert(kAtomicType<T>,
                "SetAtomicMax: int8, int16, half, bfloat16, int32 and float only, no 64-bit type");
  rec_sdk::emulator::set_atomic("SetAtomicMax", &rec_sdk::emulator::kTypeTag<T>, combine<T, Combine::kMax>);
}

template <typename T>
void SetAtomicMin() {
  static_assert(kAtomicType<T>,
                "SetAtomicMin: int8, int16, half, bfloat16, int32 and float only, no 64-bit type");
  rec_sdk::emulator::set_atomic("SetAtomicMin", &rec_sdk::emulator::kTypeTag<T>, combine<T, Combine::kMin>);
}

inline void SetAtomicNone() { rec_sdk::emulator::set_atomic_none(); }
inline void DisableDmaAtomic() { rec_sdk::emulator::set_atomic_none(); }

}  // namespace AscendC
