// The future uses of rows: for each row, one bit per announced batch that will use it. The bits of a row are
// stored by slot while it is cached and by id otherwise. When a batch is finished its bits are only ignored,
// and they are cleared before another batch reuses them, so finishing takes no time per row. Without
// announcements no memory is touched.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/directory/id_map.h"

namespace rec_sdk {

class FutureUses {
 public:
  static constexpr uint64_t kMost = 16;  // most batches to announce, counted from the oldest valid one
  static constexpr uint32_t kNever = 32;

  explicit FutureUses(int64_t slots = 0, int64_t tables = 0)
      : bits_(static_cast<size_t>(slots)), absent_(static_cast<size_t>(tables)) {}

  // Begins an announcement after all present ones and returns its ticket, which is never 0. The caller then
  // adds the rows of the batch and calls confirm(), from which on the announcement is valid. Throws
  // std::runtime_error if kMost batches are announced, and std::bad_alloc.
  uint64_t begin();
  void add(int64_t slot) { bits_[slot] |= bit(next_ - 1); }
  void add_absent(int32_t table, int64_t id);  // adds a row outside the cache; throws std::bad_alloc
  void confirm() noexcept { live_ |= bit(next_ - 1); }
  // Ends an announcement, whose batch is planned or withdrawn. A ticket that has ended is ignored.
  void forget(uint64_t ticket) noexcept;

  bool any() const { return live_ != 0; }
  // Returns how many announced batches, at most, come before the first one that uses the row in the slot;
  // kNever if none uses it.
  uint32_t distance(int64_t slot) const {
    const uint32_t bits = bits_[slot] & live_;
    if (bits == 0) return kNever;
    const int rotation = static_cast<int>(first_ % 32);
    return static_cast<uint32_t>(__builtin_ctz(bits >> rotation | bits << (-rotation & 31)));
  }

  // remove() and insert() move the bits of a row that leaves or enters the cache. They need not be called
  // while nothing is announced. Without reserve(), remove() may lose the bits of a row.
  void reserve(int32_t table, int64_t rows) { absent_[table].reserve(rows); }  // throws std::bad_alloc
  void remove(int32_t table, int64_t slot, int64_t id) noexcept;
  void insert(int32_t table, int64_t slot, int64_t id) noexcept;

 private:
  static uint32_t bit(uint64_t ticket) { return 1u << (ticket % 32); }
  void sweep();

  HugeArray<uint32_t> bits_;   // [slots] the bits of cached rows
  std::vector<IdMap> absent_;  // [T] the bits of other rows, stored as the row of the id's entry
  uint32_t live_ = 0;
  uint64_t first_ = 1;  // earlier tickets are not valid
  uint64_t next_ = 1;
};

}  // namespace rec_sdk
