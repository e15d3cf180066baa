#include "range_allocator.h"

#include <iterator>

namespace rec_sdk::emulator {

RangeAllocator::RangeAllocator(uint64_t capacity) : capacity_(capacity / kAlignment * kAlignment) {
  add_free(0, capacity_);
}

uint64_t RangeAllocator::allocate(uint64_t bytes) {
  if (bytes == 0 || bytes > capacity_) {
    return kNone;
  }
  const uint64_t wanted = aligned(bytes);
  const auto fit = by_size_.lower_bound({wanted, 0});
  if (fit == by_size_.end()) {
    return kNone;
  }
  const auto [size, offset] = *fit;
  remove_free(free_.find(offset));
  if (size > wanted) {
    add_free(offset + wanted, size - wanted);
  }
  taken_[offset] = wanted;
  used_ += wanted;
  return offset;
}

bool RangeAllocator::release(uint64_t offset) {
  const auto part = taken_.find(offset);
  if (part == taken_.end()) {
    return false;
  }
  uint64_t bytes = part->second;
  taken_.erase(part);
  used_ -= bytes;

  const auto after = free_.find(offset + bytes);
  if (after != free_.end()) {
    bytes += after->second;
    remove_free(after);
  }
  const auto behind = free_.lower_bound(offset);
  if (behind != free_.begin()) {
    const auto before = std::prev(behind);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      remove_free(before);
    }
  }
  add_free(offset, bytes);
  return true;
}

uint64_t RangeAllocator::largest_free() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

void RangeAllocator::add_free(uint64_t offset, uint64_t bytes) {
  free_[offset] = bytes;
  by_size_.insert({bytes, offset});
}

void RangeAllocator::remove_free(FreeParts::iterator part) {
  by_size_.erase({part->second, part->first});
  free_.erase(part);
}

}  // namespace rec_sdk::emulator
