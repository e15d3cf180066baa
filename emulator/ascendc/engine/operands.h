// Checks of operands: tensors in local memory that an instruction reads or writes.
#pragma once

#include <cstring>

#include "emulator/ascendc/engine/core.h"

namespace rec_sdk::emulator {

[[noreturn]] void refuse_operand(Core& core, const UbTensor& tensor, uint64_t bytes, const char* role);
[[noreturn]] void refuse_address(Core& core, uint32_t address, const char* role);

// Returns the range of the tensor's first `bytes` bytes. Fails if the tensor was freed or is smaller.
inline UbSpan operand(Core& core, const UbTensor& tensor, uint64_t bytes, const char* role) {
  if (!core.buffers.has(tensor) || bytes > tensor.bytes) {
    refuse_operand(core, tensor, bytes, role);
  }
  return {tensor.address, static_cast<uint32_t>(bytes)};
}

// Like operand(), for all engines except the scalar unit: the address must also be a multiple of 32.
inline UbSpan aligned_operand(Core& core, const UbTensor& tensor, uint64_t bytes, const char* role) {
  const UbSpan span = operand(core, tensor, bytes, role);
  if (span.address % kUbBlock != 0) {
    refuse_address(core, span.address, role);
  }
  return span;
}

// Copies an element of 1, 2, 4 or 8 bytes. A call of memcpy with a variable size would take longer than all
// checks.
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
