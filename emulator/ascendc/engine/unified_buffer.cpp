#include "emulator/ascendc/engine/unified_buffer.h"

namespace rec_sdk::emulator {
namespace {

bool any_above(const Stamp* values, uint32_t count, Stamp limit) {
  int above = 0;
  for (uint32_t i = 0; i < count; ++i) {
    above |= values[i] > limit;
  }
  return above != 0;
}

}  // namespace

void UnifiedBuffer::forget_times() {
  start_ = 0;
  std::memset(page_writes_, 0, sizeof(page_writes_));
  std::memset(page_reads_, 0, sizeof(page_reads_));
  std::memset(blocks_, 0, sizeof(blocks_));
  std::memset(read_, 0, sizeof(read_));
}

uint32_t UnifiedBuffer::unordered_write(UbSpan span, const Limits& limits) const {
  for (uint32_t block = span.first_block(); block < span.end_block(); ++block) {
    if (!limits.covers(blocks_[block].write)) {
      return block;
    }
  }
  return kNone;
}

uint32_t UnifiedBuffer::unordered_read(UbSpan span, const Limits& limits) const {
  const uint32_t first = span.first_block(), count = span.end_block() - first;
  bool found = false;
  for (int engine = 0; engine < kEngines; ++engine) {
    found |= any_above(read_[engine] + first, count, limits.by_engine[engine]);
  }
  if (!found) {
    return kNone;
  }
  uint32_t block = first;
  while (limits.covers(read_beyond(block, limits))) {
    ++block;
  }
  return block;
}

Stamp UnifiedBuffer::read_beyond(uint32_t block, const Limits& limits) const {
  for (int engine = 0; engine < kEngines; ++engine) {
    if (read_[engine][block] > limits.by_engine[engine]) {
      return read_[engine][block];
    }
  }
  return 0;
}

uint32_t UnifiedBuffer::first_unwritten(UbSpan span) const {
  for (uint32_t block = span.first_block(); block < span.end_block(); ++block) {
    const uint32_t lacking = ~valid(block) & mask_of(block, span);
    if (lacking != 0) {
      return block * kUbBlock + static_cast<uint32_t>(__builtin_ctz(lacking));
    }
  }
  return kNone;
}

void UnifiedBuffer::mark_unwritten(UbSpan span) {
  for (Block* block = blocks_ + span.first_block(); block < blocks_ + span.end_block(); ++block) {
    block->valid = 0;
  }
}

void UnifiedBuffer::mark_undefined(UbSpan span, UbSpan data) {
  for (uint32_t block = span.first_block(); block < span.end_block(); ++block) {
    const bool touched = data.address < (block + 1) * kUbBlock && data.end() > block * kUbBlock;
    blocks_[block].valid = touched ? mask_of(block, data) : 0;
  }
}

}  // namespace rec_sdk::emulator
