#include "torch_npu_ext/engine/policy/simulation.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <stdexcept>
#include <utility>

#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/directory/id_map.h"
#include "torch_npu_ext/engine/policy/cache_policy.h"

namespace rec_sdk {
namespace {

constexpr int32_t kTable = 0;

// A simulated cache of one table. Its slots are filled in ascending order.
class SimulatedCache {
 public:
  SimulatedCache(int64_t slots, int64_t rows, const std::string& policy)
      : policy_(make_cache_policy(policy, 0, slots)),
        uses_(slots),
        future_(policy_->looks_ahead() ? slots : 0, 1),
        slots_(slots),
        slot_of_(static_cast<size_t>(rows), kNoSlot),
        row_of_(static_cast<size_t>(slots)) {}

  bool looks_ahead() const { return policy_->looks_ahead(); }

  uint64_t announce(const uint32_t* rows, int64_t count) {
    const uint64_t ticket = future_.begin();
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t slot = slot_of_[rows[i]];
      slot == kNoSlot ? future_.add_absent(kTable, rows[i]) : future_.add(slot);
    }
    future_.confirm();
    return ticket;
  }

  // Plans a batch of distinct rows and counts its misses and victims. `ticket` is the ticket of its
  // announcement, or 0.
  void plan(const uint32_t* rows, int64_t count, uint64_t ticket, SimulatedCounts* counts) {
    if (count > slots_) {
      throw CacheTooSmallError("a batch needs " + std::to_string(count) + " distinct rows in a cache of " +
                               std::to_string(slots_) + " slots");
    }
    uses_.begin_batch(0);
    missing_.clear();
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t slot = slot_of_[rows[i]];
      slot == kNoSlot ? missing_.push_back(rows[i]) : uses_.touch(slot);
    }
    future_.forget(ticket);
    const int64_t missed = static_cast<int64_t>(missing_.size());
    const int64_t out = std::max<int64_t>(0, missed - (slots_ - used_));
    taken_.resize(missing_.size());
    for (int64_t i = 0; i < missed - out; ++i) taken_[i] = static_cast<uint32_t>(used_++);
    if (out > 0) swap_out(out, taken_.data() + missed - out);
    swap_in();
    used_slots_.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) used_slots_[i] = slot_of_[rows[i]];
    policy_->touch(used_slots_.data(), count);
    counts->misses += missed;
    counts->rows_out += out;
  }

 private:
  void swap_out(int64_t count, uint32_t* victims) {
    policy_->evict(count, &uses_, future_, victims);
    victim_rows_.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      victim_rows_[i] = row_of_[victims[i]];
      slot_of_[victim_rows_[i]] = kNoSlot;
    }
    policy_->remove(victims, victim_rows_.data(), count);
    if (!future_.any()) return;
    future_.reserve(kTable, count);
    for (int64_t i = 0; i < count; ++i) future_.remove(kTable, victims[i], victim_rows_[i]);
  }

  void swap_in() {
    for (size_t i = 0; i < missing_.size(); ++i) {
      slot_of_[missing_[i]] = taken_[i];
      row_of_[taken_[i]] = missing_[i];
      uses_.touch(taken_[i]);
    }
    policy_->insert(taken_.data(), missing_.data(), static_cast<int64_t>(missing_.size()));
    if (!future_.any()) return;
    for (size_t i = 0; i < missing_.size(); ++i) future_.insert(kTable, taken_[i], missing_[i]);
  }

  std::unique_ptr<CachePolicy> policy_;
  SlotUses uses_;
  FutureUses future_;
  int64_t slots_, used_ = 0;
  std::vector<uint32_t> slot_of_;  // [rows]
  std::vector<uint32_t> row_of_;   // [slots]
  std::vector<uint32_t> missing_, taken_, victim_rows_, used_slots_;
};

}  // namespace

CacheTrace::CacheTrace(const int64_t* ids, int64_t count, const int64_t* starts, int64_t batches) {
  bool ascending = batches >= 0 && starts[0] == 0 && starts[batches] == count;
  for (int64_t b = 0; b < batches && ascending; ++b) ascending = starts[b] <= starts[b + 1];
  if (!ascending) throw std::invalid_argument("starts must ascend from 0 to the number of ids");
  IdMap known;
  std::vector<int64_t> last_batch;  // the number of the last batch of each row; the first batch is 1
  starts_.push_back(0);
  for (int64_t b = 0; b < batches; ++b) {
    known.reserve(starts[b + 1] - starts[b]);
    for (int64_t i = starts[b]; i < starts[b + 1]; ++i) {
      bool added = false;
      const IdMap::Entry entry =
          known.find_or_add(ids[i], IdMap::hash(ids[i]), static_cast<uint32_t>(last_batch.size()), &added);
      if (added) last_batch.push_back(0);
      if (std::exchange(last_batch[entry.row()], b + 1) != b + 1) rows_.push_back(entry.row());
    }
    new_rows_.push_back(static_cast<int64_t>(last_batch.size()) - distinct_);
    distinct_ = static_cast<int64_t>(last_batch.size());
    starts_.push_back(static_cast<int64_t>(rows_.size()));
    largest_ = std::max(largest_, starts_[b + 1] - starts_[b]);
  }
}

SimulatedCounts CacheTrace::simulate(int64_t slots, const std::string& policy, int64_t ahead,
                                     int64_t warm) const {
  if (slots < 0) throw std::invalid_argument("slots is " + std::to_string(slots) + ", must be at least 0");
  SimulatedCache cache(slots, distinct_, policy);
  SimulatedCounts counts, before;
  std::deque<uint64_t> announced;
  for (int64_t b = 0; b < batches(); ++b) {
    while (cache.looks_ahead() && static_cast<int64_t>(announced.size()) <= ahead) {
      const int64_t at = b + static_cast<int64_t>(announced.size());
      if (at >= batches()) break;
      announced.push_back(cache.announce(rows_.data() + starts_[at], starts_[at + 1] - starts_[at]));
    }
    const uint64_t ticket = announced.empty() ? 0 : announced.front();
    if (!announced.empty()) announced.pop_front();
    if (b == warm) before = counts;
    counts.rows += starts_[b + 1] - starts_[b];
    counts.new_rows += new_rows_[b];
    cache.plan(rows_.data() + starts_[b], starts_[b + 1] - starts_[b], ticket, &counts);
  }
  counts.rows -= before.rows;
  counts.new_rows -= before.new_rows;
  counts.misses -= before.misses;
  counts.rows_out -= before.rows_out;
  return counts;
}

}  // namespace rec_sdk
