// The rules for a tensor in local memory that is an operand of an instruction.
#pragma once

#include <cstring>

#include "emulator/ascendc/engine/core.h"

namespace rec_sdk::emulator {

[[noreturn]] void refuse_operand(Core& core, const UbTensor& tensor, uint64_t bytes, const char* role);
[[noreturn]] void refuse_address(Core& core, uint32_t address, const char* role);

// Returns the first `bytes` bytes of the tensor; fails if the tensor was freed or is smaller.
inline UbSpan operand(Core& core, const UbTensor& tensor, uint64_t bytes, const char* role) {
  if (!core.buffers.has(tensor) || bytes > tensor.bytes) {
    refuse_operand(core, tensor, bytes, role);
  }
  return {tensor.address, static_cast<uint32_t>(bytes)};
}

// For all engines except the scalar unit: also requires an address that is a multiple of 32 bytes.
inline UbSpan aligned_operand(Core& core, const UbTensor& tensor, uint64_t bytes, const char* role) {
  const UbSpan span = operand(core, tensor, bytes, role);
  if (span.address % kUbBlock != 0) {
    refuse_address(core, span.address, role);
  }
  return span;
}

// Copies an element of 1, 2, 4 or 8 bytes; a call of memcpy would cost more than all checks.
inline void copy_element(void* to, const void* from, uint64_t bytes) {
  switch (bytes) {
    case 1:
      return void(std::memcpy(to, from, 1));
    case 2:
      return void(std::memcpy(to, from, 2));
    case 4:
      return void(std::memcpy(to, from, 4));
    default:
      return void(std::memcpy(to, from, 8));
  }
}

}  // namespace rec_sdk::emulator
