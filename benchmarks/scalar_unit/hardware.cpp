// Executes copies, the only instructions of kernel_operator.h that the control flow of kernels depends on.
// This file is compiled separately, so that none of its code is counted.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "assembler.h"

extern "C" {

int64_t scalar_unit_block, scalar_unit_blocks;
uint64_t scalar_unit_operands[4];
alignas(32) uint8_t scalar_unit_ub[192 * 1024];
uint32_t scalar_unit_ub_used;
uint64_t scalar_unit_count;

__attribute__((used)) void scalar_unit_do_copy(bool in) {
  const auto [to, from, blocks, gaps] = reinterpret_cast<const uint64_t (&)[4]>(scalar_unit_operands);
  const uint64_t count = blocks >> 4 & 0xfff, bytes = blocks >> 16 & 0xffffffff;
  const uint64_t in_ub = (bytes + 31) / 32 * 32 + 32 * (in ? gaps >> 32 : gaps & 0xffffffff);
  const uint64_t in_gm = bytes + (in ? gaps & 0xffffffff : gaps >> 32);
  for (uint64_t i = 0; i < count; ++i) {
    std::memcpy(reinterpret_cast<void*>(to + i * (in ? in_ub : in_gm)),
                reinterpret_cast<const void*>(from + i * (in ? in_gm : in_ub)), bytes);
  }
}

// Preserves every register, so that the kernel sees a copy as one instruction.
REC_SDK_KEEPS_REGISTERS("scalar_unit_copy_in", "1");
REC_SDK_KEEPS_REGISTERS("scalar_unit_copy_out", "0");

}  // extern "C"
