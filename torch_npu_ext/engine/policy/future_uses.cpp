#include "torch_npu_ext/engine/policy/future_uses.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace rec_sdk {

uint64_t FutureUses::begin() {
  if (live_ != 0 && next_ - first_ >= kMost) {
    throw std::runtime_error("at most " + std::to_string(kMost) +
                             " batches can be announced; plan or forget the oldest of them first");
  }
  // sweep() clears the bits of finished batches. A bit is reused after 32 tickets, and an announcement is
  // valid for at most 16, so each bit is cleared before its reuse.
  if (next_ % kMost == 0) sweep();
  if (live_ == 0) first_ = next_;
  return next_++;
}

void FutureUses::add_absent(int32_t table, int64_t id) {
  IdMap& absent = absent_[table];
  absent.reserve(1);
  bool added = false;
  const IdMap::Entry entry = absent.find_or_add(id, IdMap::hash(id), 0, &added);
  entry.set_row(entry.row() | bit(next_ - 1));
}

void FutureUses::forget(uint64_t ticket) noexcept {
  if (ticket < first_ || ticket >= next_) return;
  live_ &= ~bit(ticket);
  while (first_ < next_ && (live_ & bit(first_)) == 0) ++first_;
}

void FutureUses::remove(int32_t table, int64_t slot, int64_t id) noexcept {
  const uint32_t bits = std::exchange(bits_[slot], 0) & live_;
  if (bits == 0 || absent_[table].growth(1) > 0) return;
  bool added = false;
  absent_[table].find_or_add(id, IdMap::hash(id), bits, &added).set_row(bits);
}

void FutureUses::insert(int32_t table, int64_t slot, int64_t id) noexcept {
  bits_[slot] = 0;
  if (absent_[table].size() == 0) return;
  const IdMap::Entry entry = absent_[table].find(id, IdMap::hash(id));
  if (!entry) return;
  bits_[slot] = entry.row();
  absent_[table].erase(id, IdMap::hash(id));
}

void FutureUses::sweep() {
  for (IdMap& absent : absent_) {
    IdMap kept;
    absent.for_each([&](int64_t id, const IdMap::Entry& entry) {
      if ((entry.row() & live_) == 0) return;
      kept.reserve(1);
      bool added = false;
      kept.find_or_add(id, IdMap::hash(id), entry.row() & live_, &added);
    });
    absent = std::move(kept);
  }
  for (size_t slot = 0; slot < bits_.size(); ++slot) bits_[slot] &= live_;
}

}  // namespace rec_sdk
