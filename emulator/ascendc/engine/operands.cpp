#include "emulator/ascendc/engine/operands.h"

#include "emulator/ascendc/engine/instructions.h"
#include "emulator/ascendc/engine/text.h"

namespace rec_sdk::emulator {

void refuse_operand(Core& core, const UbTensor& tensor, uint64_t bytes, const char* role) {
  if (!core.buffers.has(tensor)) {
    core.fail(text("%s is a tensor at local address %u that was freed, or was never allocated", role,
                   tensor.address));
  }
  core.fail(text("%s has %u bytes, %lu are needed", role, tensor.bytes, bytes));
}

void refuse_address(Core& core, uint32_t address, const char* role) {
  core.fail(
      text("%s starts at local address %u: it must be a multiple of %u bytes", role, address, kUbBlock));
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

void refuse_offset(const UbTensor& tensor, uint64_t offset, uint64_t element_bytes) {
  Core& core = current_core();
  core.issue(kScalar, "LocalTensor[]");
  core.fail(text("offset %lu of a tensor of %lu elements", offset, tensor.bytes / element_bytes));
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
