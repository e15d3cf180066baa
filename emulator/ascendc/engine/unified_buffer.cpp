// Compiled with -O3: the loops over blocks are on the path of every instruction.
#include "emulator/ascendc/engine/unified_buffer.h"

#include <cstring>

namespace rec_sdk::emulator {
namespace {

constexpr uint32_t kWhole = UINT32_MAX;

// The bits of a block's bytes that lie in [address, end).
uint32_t block_mask(uint32_t block, uint32_t address, uint32_t end) {
  const uint32_t start = block * kUbBlock;
  const uint32_t from = address > start ? address - start : 0;
  const uint32_t to = end < start + kUbBlock ? end - start : kUbBlock;
  const uint32_t below_to = to == kUbBlock ? kWhole : (1u << to) - 1;
  return below_to & ~((1u << from) - 1);
}

// Whether all values are the same, which is so after one instruction that wrote them all.
bool uniform(const Stamp* values, uint32_t count) {
  Stamp different = 0;
  for (uint32_t i = 0; i < count; ++i) {
    different |= values[i] ^ values[0];
  }
  return different == 0;
}

bool any_above(const Stamp* values, uint32_t count, Stamp limit) {
  int above = 0;
  for (uint32_t i = 0; i < count; ++i) {
    above |= values[i] > limit;
  }
  return above != 0;
}

template <class T>
void fill(T* values, uint32_t count, T value) {
  for (uint32_t i = 0; i < count; ++i) {
    values[i] = value;
  }
}

}  // namespace

void UnifiedBuffer::forget() {
  std::memset(valid_, 0, used_blocks_ * sizeof(valid_[0]));
  used_blocks_ = 0;
}

void UnifiedBuffer::forget_times() {
  forget();
  std::memset(write_, 0, sizeof(write_));
  std::memset(read_, 0, sizeof(read_));
}

uint32_t UnifiedBuffer::unordered_write(UbSpan span, const Limits& limits) const {
  const uint32_t first = span.first_block(), end = span.end_block();
  if (limits.covers(write_[first]) && uniform(write_ + first, end - first)) {
    return kNone;
  }
  for (uint32_t block = first; block < end; ++block) {
    if (!limits.covers(write_[block])) {
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
  const uint32_t first = span.first_block(), end = span.end_block();
  uint32_t missing = 0;
  for (uint32_t block = first + 1; block + 1 < end; ++block) {
    missing |= ~valid_[block];
  }
  missing |= ~valid_[first] & block_mask(first, span.address, span.end());
  missing |= ~valid_[end - 1] & block_mask(end - 1, span.address, span.end());
  if (missing == 0) {
    return kNone;
  }
  for (uint32_t block = first; block < end; ++block) {
    const uint32_t lacking = ~valid_[block] & block_mask(block, span.address, span.end());
    if (lacking != 0) {
      return block * kUbBlock + static_cast<uint32_t>(__builtin_ctz(lacking));
    }
  }
  return kNone;
}

void UnifiedBuffer::mark_read(UbSpan span, Stamp stamp) {
  const uint32_t first = span.first_block();
  fill(read_[stamp_engine(stamp)] + first, span.end_block() - first, stamp);
}

void UnifiedBuffer::mark_written(UbSpan span, Stamp stamp) {
  const uint32_t first = span.first_block(), end = span.end_block();
  fill(write_ + first, end - first, stamp);
  if (end - first > 2) {
    fill(valid_ + first + 1, end - first - 2, kWhole);
  }
  valid_[first] |= block_mask(first, span.address, span.end());
  valid_[end - 1] |= block_mask(end - 1, span.address, span.end());
  used_blocks_ = used_blocks_ > end ? used_blocks_ : end;
}

void UnifiedBuffer::mark_unwritten(UbSpan span) {
  const uint32_t first = span.first_block();
  fill(valid_ + first, span.end_block() - first, uint32_t{0});
}

void UnifiedBuffer::mark_undefined(UbSpan span, UbSpan data) {
  for (uint32_t block = span.first_block(); block < span.end_block(); ++block) {
    const bool touched = data.address < (block + 1) * kUbBlock && data.end() > block * kUbBlock;
    valid_[block] = touched ? block_mask(block, data.address, data.end()) : 0;
  }
}

}  // namespace rec_sdk::emulator
