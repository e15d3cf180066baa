#include "emulator/ascendc/engine/operands.h"

#include "emulator/ascendc/engine/instructions.h"
#include "emulator/ascendc/engine/text.h"

namespace rec_sdk::emulator {

UbSpan operand(Core& core, const UbTensor& tensor, uint64_t bytes, const char* role) {
  if (tensor.buffer != kNoBuffer) {
    const bool known = tensor.buffer < core.buffers.count &&
                       core.buffers.items[tensor.buffer].generation == tensor.generation;
    if (!known) {
      core.fail(text("%s is a tensor at local address %u that was freed, or was never allocated", role,
                     tensor.address));
    }
  }
  if (bytes > tensor.bytes) {
    core.fail(text("%s has %u bytes, %lu are needed", role, tensor.bytes, bytes));
  }
  return {tensor.address, static_cast<uint32_t>(bytes)};
}

UbSpan aligned_operand(Core& core, const UbTensor& tensor, uint64_t bytes, const char* role) {
  const UbSpan span = operand(core, tensor, bytes, role);
  if (span.address % kUbBlock != 0) {
    core.fail(text("%s starts at local address %u: it must be a multiple of %u bytes", role, span.address,
                   kUbBlock));
  }
  return span;
}

GmTensor part_of(const GmTensor& tensor, uint64_t offset, uint64_t element_bytes) {
  const uint64_t bytes = offset * element_bytes;
  if (tensor.bytes == UINT64_MAX) {
    return {tensor.address + bytes, UINT64_MAX};
  }
  if (bytes > tensor.bytes) {
    Core& core = current_core();
    core.issue(kScalar, "GlobalTensor[]");
    core.fail(text("offset %lu of a tensor of %lu elements", offset, tensor.bytes / element_bytes));
  }
  return {tensor.address + bytes, tensor.bytes - bytes};
}

UbTensor part_of(const UbTensor& tensor, uint64_t offset, uint64_t element_bytes) {
  const uint64_t bytes = offset * element_bytes;
  if (bytes > tensor.bytes) {
    Core& core = current_core();
    core.issue(kScalar, "LocalTensor[]");
    core.fail(text("offset %lu of a tensor of %lu elements", offset, tensor.bytes / element_bytes));
  }
  UbTensor part = tensor;
  part.address += static_cast<uint32_t>(bytes);
  part.bytes -= static_cast<uint32_t>(bytes);
  return part;
}

UbTensor resized(const UbTensor& tensor, uint64_t bytes) {
  if (bytes > tensor.bytes) {
    Core& core = current_core();
    core.issue(kScalar, "LocalTensor");
    core.fail(text("%lu bytes of a tensor of %u", bytes, tensor.bytes));
  }
  UbTensor part = tensor;
  part.bytes = static_cast<uint32_t>(bytes);
  return part;
}

}  // namespace rec_sdk::emulator
