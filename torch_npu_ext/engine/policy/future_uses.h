// Which announced batches will use each row: a bit per batch, kept with the slot of a resident row and by id
// of the others, and moved when rows come and go. Bits of batches that are over mean nothing, and are swept
// away before another batch gets them; so it costs nothing per row that a batch is over. Without
// announcements no memory is touched.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/directory/id_map.h"

namespace rec_sdk {

class FutureUses {
 public:
  static constexpr uint64_t kMost = 16;  // batches announced from the oldest live one on
  static constexpr uint32_t kNever = 32;

  explicit FutureUses(int64_t slots = 0, int64_t tables = 0)
      : bits_(static_cast<size_t>(slots)), absent_(static_cast<size_t>(tables)) {}

  // A ticket, not 0, for a batch that comes after all those announced. Throws std::runtime_error when there
  // are kMost, and std::bad_alloc. Its rows are then added, and it counts from confirm() on.
  uint64_t begin();
  void add(int64_t slot) { bits_[slot] |= bit(next_ - 1); }
  void add_absent(int32_t table, int64_t id);  // of a row that is not resident; throws std::bad_alloc
  void confirm() noexcept { live_ |= bit(next_ - 1); }
  // The batch is planned, or will never come. Tickets that are over do nothing.
  void forget(uint64_t ticket) noexcept;

  bool any() const { return live_ != 0; }
  // How many batches, at the most, are announced before the first that needs the row in the slot; kNever if
  // none does.
  uint32_t distance(int64_t slot) const {
    const uint32_t bits = bits_[slot] & live_;
    if (bits == 0) return kNever;
    const int turn = static_cast<int>(first_ % 32);
    return static_cast<uint32_t>(__builtin_ctz(bits >> turn | bits << (-turn & 31)));
  }

  // Rows that go and come; callers leave these out while there is nothing announced. remove() needs
  // reserve(), without which it may forget the row's uses.
  void reserve(int32_t table, int64_t rows) { absent_[table].reserve(rows); }  // throws std::bad_alloc
  void remove(int32_t table, int64_t slot, int64_t id) noexcept;
  void insert(int32_t table, int64_t slot, int64_t id) noexcept;

 private:
  static uint32_t bit(uint64_t ticket) { return 1u << (ticket % 32); }
  void sweep();

  HugeArray<uint32_t> bits_;   // [slots] of resident rows
  std::vector<IdMap> absent_;  // [T] id -> bits, in place of a row
  uint32_t live_ = 0;
  uint64_t first_ = 1;  // no ticket before is live
  uint64_t next_ = 1;
};

}  // namespace rec_sdk
