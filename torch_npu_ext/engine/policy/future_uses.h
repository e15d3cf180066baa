// The announced batches that will use each row: one bit per batch, stored by slot for cached rows and by id
// for other rows, and moved with the rows. Bits of finished batches are ignored, and cleared before another
// batch gets them, so finishing a batch costs nothing per row. Without announcements no memory is touched.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/directory/id_map.h"

namespace rec_sdk {

class FutureUses {
 public:
  static constexpr uint64_t kMost = 16;  // batches that can be announced, counted from the oldest live one
  static constexpr uint32_t kNever = 32;

  explicit FutureUses(int64_t slots = 0, int64_t tables = 0)
      : bits_(static_cast<size_t>(slots)), absent_(static_cast<size_t>(tables)) {}

  // Starts an announcement after all present ones and returns its ticket, which is not 0. The batch's rows
  // are added next; it counts once confirm() is called. Throws std::runtime_error if kMost batches are
  // announced, and std::bad_alloc.
  uint64_t begin();
  void add(int64_t slot) { bits_[slot] |= bit(next_ - 1); }
  void add_absent(int32_t table, int64_t id);  // for a row outside the cache; throws std::bad_alloc
  void confirm() noexcept { live_ |= bit(next_ - 1); }
  // Ends an announcement whose batch is planned or withdrawn. Ended tickets are ignored.
  void forget(uint64_t ticket) noexcept;

  bool any() const { return live_ != 0; }
  // Returns an upper bound of the number of announced batches before the first one that uses the row in the
  // slot; kNever if none does.
  uint32_t distance(int64_t slot) const {
    const uint32_t bits = bits_[slot] & live_;
    if (bits == 0) return kNever;
    const int rotation = static_cast<int>(first_ % 32);
    return static_cast<uint32_t>(__builtin_ctz(bits >> rotation | bits << (-rotation & 31)));
  }

  // Move the uses of rows that leave or enter the cache; not needed while nothing is announced. Without
  // reserve(), remove() may lose the uses of a row.
  void reserve(int32_t table, int64_t rows) { absent_[table].reserve(rows); }  // throws std::bad_alloc
  void remove(int32_t table, int64_t slot, int64_t id) noexcept;
  void insert(int32_t table, int64_t slot, int64_t id) noexcept;

 private:
  static uint32_t bit(uint64_t ticket) { return 1u << (ticket % 32); }
  void sweep();

  HugeArray<uint32_t> bits_;   // [slots] of cached rows
  std::vector<IdMap> absent_;  // [T] id -> bits, stored as the entry's row
  uint32_t live_ = 0;
  uint64_t first_ = 1;  // earlier tickets are not live
  uint64_t next_ = 1;
};

}  // namespace rec_sdk
