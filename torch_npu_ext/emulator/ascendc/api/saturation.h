// What 16-bit floats become that are infinite or not a number: as a core comes up, results of arithmetic and
// of Cast saturate to the largest number and to 0. Off, they stay as they are.
#pragma once

#include "torch_npu_ext/emulator/ascendc/api/tensors.h"
#include "torch_npu_ext/emulator/ascendc/engine/elementwise.h"

namespace AscendC {

enum class SaturationMode : uint8_t { FLOAT, FLOAT8, INT, CAST };

template <SaturationMode mode>
void SetSaturationFlag(bool enableSat) {
  static_assert(mode == SaturationMode::FLOAT,
                "SetSaturationFlag: the emulator has FLOAT only; casts to integers always saturate");
  rec_sdk::emulator::set_saturation(enableSat);
}

template <SaturationMode mode>
bool GetSaturationFlag() {
  static_assert(mode == SaturationMode::FLOAT,
                "GetSaturationFlag: the emulator has FLOAT only; casts to integers always saturate");
  return rec_sdk::emulator::saturation();
}

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
