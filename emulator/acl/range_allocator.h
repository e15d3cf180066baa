// A best-fit allocator of parts of [0, capacity). It merges adjacent free parts.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace rec_sdk::emulator {

class RangeAllocator {
 public:
  static constexpr uint64_t kAlignment = 512;
  static constexpr uint64_t kNone = UINT64_MAX;

  explicit RangeAllocator(uint64_t capacity);

  // Allocates `bytes` bytes and returns their offset, a multiple of kAlignment; kNone if no free part is
  // large enough.
  uint64_t allocate(uint64_t bytes);

  // Frees an allocation; returns false if nothing is allocated at that offset.
  bool release(uint64_t offset);

  uint64_t capacity() const { return capacity_; }
  uint64_t used() const { return used_; }  // number of allocated bytes, including padding for alignment
  uint64_t largest_free() const;

  static uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

 private:
  using FreeParts = std::map<uint64_t, uint64_t>;  // offset -> bytes

  void add_free(uint64_t offset, uint64_t bytes);
  void remove_free(FreeParts::iterator part);

  uint64_t capacity_;
  uint64_t used_ = 0;
  FreeParts free_;
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // (bytes, offset) of the same parts
  std::map<uint64_t, uint64_t> taken_;
};

}  // namespace rec_sdk::emulator
