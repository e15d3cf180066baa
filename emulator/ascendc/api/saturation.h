// 16-bit floats that are infinite or not a number: while bit 48 of the control register is 0,
// results of arithmetic and of Cast saturate to the largest number and to 0; at 1, they stay as they are.
#pragma once

#include "emulator/ascendc/api/tensors.h"
#include "emulator/ascendc/engine/elementwise.h"

// bisheng names the register so in every CANN since 8.5.
inline int64_t get_ctrl() { return static_cast<int64_t>(rec_sdk::emulator::control()); }
inline void set_ctrl(uint64_t value) { rec_sdk::emulator::set_control(value); }

namespace AscendC {

template <typename T>
constexpr rec_sdk::emulator::SaturateFunction saturate_function() {
  if constexpr (kOneOf<T, half, bfloat16_t>) {
    return rec_sdk::emulator::saturate<T>;
  }
  return nullptr;
}

// An instruction that computes values of T; what it computes them from is added.
template <typename T>
rec_sdk::emulator::VectorCall vector_call(const char* name, const LocalTensor<T>& dst, int64_t count) {
  return {name, nullptr, count, &dst.memory(), sizeof(T), saturate_function<T>()};
}

}  // namespace AscendC
