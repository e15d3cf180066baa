// The saturation of 16-bit floats. While bit 48 of the control register is 0, infinite results of arithmetic
// and Cast become the largest number, and NaN becomes 0. While the bit is 1, infinity and NaN are kept.
#pragma once

#include "emulator/ascendc/api/tensors.h"
#include "emulator/ascendc/engine/elementwise.h"

// get_ctrl() and set_ctrl() are the names of the register's access functions since CANN 8.5.
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

// Returns the description of an instruction that computes values of T. The caller adds its operands.
template <typename T>
rec_sdk::emulator::VectorCall vector_call(const char* name, const LocalTensor<T>& dst, int64_t count) {
  return {name, nullptr, count, &dst.memory(), sizeof(T), saturate_function<T>()};
}

}  // namespace AscendC
