// The copy engines: MTE2 copies into local memory, and MTE3 copies out of it.
#include <cstring>

#include "emulator/ascendc/engine/gm.h"
#include "emulator/ascendc/engine/instructions.h"
#include "emulator/ascendc/engine/operands.h"
#include "emulator/ascendc/engine/text.h"
#include "emulator/ascendc/soc.h"

namespace rec_sdk::emulator {
namespace {

constexpr int64_t kMaxBlocks = 4095;
constexpr int64_t kMaxBlockBytes = 2097151;
constexpr uint32_t kMaxPaddingBytes = 32;
constexpr int64_t kMaxLocalStride3510 = 65535;

bool takes_any_length(const Copy& copy) {
  return copy.name[8] == 'P';
}  // whether it is DataCopyPad and not DataCopy

void check_shape(Core& core, const Copy& copy) {
  if (copy.blocks > kMaxBlocks) {
    core.fail(
        text("blockCount %ld: 0 to %ld", static_cast<long>(copy.blocks), static_cast<long>(kMaxBlocks)));
  }
  if (!takes_any_length(copy)) {
    if (copy.block_bytes % kUbBlock != 0) {
      core.fail(text("%ld bytes: DataCopy rounds down to a multiple of %u and says nothing; use DataCopyPad",
                     static_cast<long>(copy.block_bytes), kUbBlock));
    }
    if (copy.global.address % copy.element_bytes != 0) {
      core.fail(text("global address %#lx: for DataCopy it must be a multiple of the element's %u bytes",
                     copy.global.address, copy.element_bytes));
    }
    return;
  }
  if (REC_SDK_ASCENDC_ARCH == 3510 &&
      (copy.local_stride > kMaxLocalStride3510 || copy.global_stride < -copy.block_bytes)) {
    core.fail(
        text("strides of %ld bytes in global and %ld blocks in local memory: from -blockLen on, and 0 to %ld",
             static_cast<long>(copy.global_stride), static_cast<long>(copy.local_stride),
             static_cast<long>(kMaxLocalStride3510)));
  }
  if (copy.block_bytes > kMaxBlockBytes) {
    core.fail(text("blockLen %ld bytes: 0 to %ld", static_cast<long>(copy.block_bytes),
                   static_cast<long>(kMaxBlockBytes)));
  }
  if (copy.block_bytes % copy.element_bytes != 0) {
    core.fail(text("blockLen %ld is in bytes and must be a multiple of the element's %u",
                   static_cast<long>(copy.block_bytes), copy.element_bytes));
  }
}

void check_padding(Core& core, const Copy& copy, const Padding& padding) {
  if (padding.left * copy.element_bytes > kMaxPaddingBytes ||
      padding.right * copy.element_bytes > kMaxPaddingBytes) {
    core.fail(text("padding of %u elements on the left, %u on the right: each side has at most %u bytes",
                   padding.left, padding.right, kMaxPaddingBytes));
  }
  if (padding.given && copy.element_bytes == 8 && padding.value != 0) {
    core.fail("paddingValue of a 64-bit type must be 0");
  }
}

// Checks the position of the local tensor. Tensors of LocalMemAllocator may have any position.
void check_position(Core& core, const Copy& copy, bool arrives) {
  if (copy.local.buffer == kNoBuffer || copy.local.position != kVecCalc) return;
  if (arrives && REC_SDK_ASCENDC_ARCH == 3510) return;
  core.fail(arrives ? "a tensor at VECCALC: on A2 and A3 copies come to VECIN and VECOUT only"
                    : "a tensor at VECCALC: copies go from VECIN and VECOUT only");
}

// Checks the copy against the declared size of the global tensor, if it has one. It is checked against the
// buffers of the launch when the bytes are accessed.
void check_extent(Core& core, const Copy& copy) {
  if (copy.global.bytes == UINT64_MAX) {
    return;
  }
  const int64_t extent = copy.blocks * copy.block_bytes + (copy.blocks - 1) * copy.global_stride;
  if (extent > 0 && static_cast<uint64_t>(extent) > copy.global.bytes) {
    core.fail(text("%ld bytes of a tensor in global memory that has %lu", static_cast<long>(extent),
                   copy.global.bytes));
  }
}

// Returns the range of local memory from the first to the last block. Blocks begin `step` bytes apart, and
// each contains `used` bytes.
UbSpan local_extent(Core& core, const Copy& copy, int64_t used, int64_t step, const char* role) {
  const int64_t bytes = (copy.blocks - 1) * step + used;
  return aligned_operand(core, copy.local, static_cast<uint64_t>(bytes), role);
}

// Fills memory with copies of an element of 1, 2, 4 or 8 bytes.
void fill_elements(uint8_t* to, uint64_t bytes, const void* element, uint32_t element_bytes) {
  uint8_t eight[8];
  for (uint32_t at = 0; at < sizeof(eight); at += element_bytes) {
    copy_element(eight + at, element, element_bytes);
  }
  uint64_t at = 0;
  for (; at + sizeof(eight) <= bytes; at += sizeof(eight)) {
    std::memcpy(to + at, eight, sizeof(eight));
  }
  std::memcpy(to + at, eight, bytes - at);
}

// A block in local memory, with its padding.
struct Block {
  uint32_t left, data, right, total;  // in bytes; `total` is rounded up to a multiple of 32
};

bool asks_for_padding(const Block& block) { return block.left != 0 || block.right != 0; }

// Returns whether the bytes before and behind the data get defined values.
bool is_defined(const Block& block, const Padding& padding) {
  return block.total == block.data || !asks_for_padding(block) || padding.given;
}

void pad_block(uint8_t* to, const Block& block, uint32_t element_bytes, const Padding& padding) {
  if (block.total == block.data || !is_defined(block, padding)) {
    return;
  }
  const uint32_t behind = block.total - block.left - block.data;
  // If the call does not request padding, the hardware repeats the first element.
  const void* element = asks_for_padding(block) ? static_cast<const void*>(&padding.value) : to;
  fill_elements(to, block.left, element, element_bytes);
  fill_elements(to + block.left + block.data, behind, element, element_bytes);
}

}  // namespace

void copy_in(const Copy& copy, const Padding& padding) {
  Core& core = current_core();
  core.issue(kMte2, copy.name);
  check_shape(core, copy);
  check_position(core, copy, true);
  check_padding(core, copy, padding);
  if (copy.blocks == 0 || copy.block_bytes == 0) {
    return;
  }
  check_extent(core, copy);
  const uint32_t left = padding.left * copy.element_bytes, right = padding.right * copy.element_bytes;
  const auto data = static_cast<uint32_t>(copy.block_bytes);
  const Block block{left, data, right, static_cast<uint32_t>(round_up_to_block(left + data + right))};
  const int64_t step = block.total + copy.local_stride * kUbBlock;
  const UbSpan all = local_extent(core, copy, block.total, step, "dst");
  for (int64_t i = 0; i < copy.blocks; ++i) {
    const UbSpan span{all.address + static_cast<uint32_t>(i * step), block.total};
    core.check_write(span);
    const uint64_t from =
        copy.global.address + static_cast<uint64_t>(i * (copy.block_bytes + copy.global_stride));
    uint8_t* to = core.ub.at(span.address);
    const uint8_t* host = core.gm().copy_in(core, from, data);
    core.schedule.run(kMte2, [to, host, block, padding, bytes = copy.element_bytes] {
      std::memcpy(to + block.left, host, block.data);
      pad_block(to, block, bytes, padding);
    });
    core.mark_written(span);
    if (!is_defined(block, padding)) {
      core.ub.mark_undefined(span, {span.address + left, data});
    }
  }
  core.counters.mte2_instructions += 1;
  core.counters.mte2_gm_bytes += copy.blocks * copy.block_bytes;
  core.counters.mte2_ub_bytes += copy.blocks * block.total;
}

void copy_out(const Copy& copy) {
  Core& core = current_core();
  core.issue(kMte3, copy.name);
  check_shape(core, copy);
  check_position(core, copy, false);
  if (copy.blocks == 0 || copy.block_bytes == 0) {
    return;
  }
  check_extent(core, copy);
  if (core.atomic.on && core.atomic.type != copy.type) {
    core.fail("the copied type is not the one that SetAtomicAdd, SetAtomicMax or SetAtomicMin was given");
  }
  const auto data = static_cast<uint32_t>(copy.block_bytes);
  const auto total = static_cast<int64_t>(round_up_to_block(data));
  const int64_t step = total + copy.local_stride * kUbBlock;
  const UbSpan all = local_extent(core, copy, data, step, "src");
  for (int64_t i = 0; i < copy.blocks; ++i) {
    const UbSpan span{all.address + static_cast<uint32_t>(i * step), data};
    core.check_read(span);
    core.mark_read(span);
    const uint64_t to =
        copy.global.address + static_cast<uint64_t>(i * (copy.block_bytes + copy.global_stride));
    uint8_t* host = core.gm().copy_out(core, to, data);
    core.schedule.run(kMte3, [host, from = core.ub.at(span.address), data,
                              combine = core.atomic.on ? core.atomic.combine : nullptr] {
      if (combine != nullptr) {
        combine(host, from, data);
      } else {
        std::memcpy(host, from, data);
      }
    });
  }
  core.counters.mte3_instructions += 1;
  core.counters.mte3_gm_bytes += copy.blocks * copy.block_bytes;
  core.counters.mte3_ub_bytes += copy.blocks * total;
}

}  // namespace rec_sdk::emulator
