// Admission by a separate count for each id.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "torch_npu_ext/engine/rules/admission.h"

namespace rec_sdk {

// An id gets a row in the batch in which alpha * shows + beta * clicks reaches the threshold.
class CandidateAdmission final : public Admission {
 public:
  CandidateAdmission(const AdmissionTable& table, double threshold, double alpha, double beta)
      : Admission(table.wide),
        table_(table.name),
        memory_(table.memory),
        threshold_(threshold),
        alpha_(alpha),
        beta_(beta) {}

  void count(const Batch& batch, const Batch::Piece& piece, const TableClock& clock_now, size_t first,
             std::vector<UnknownLookup>* lookups, LifecycleLog* log) override {
    const TableClock clock = clock_now;
    const uint32_t now = static_cast<uint32_t>(clock.batches);
    const int64_t shift = piece.source - piece.begin, moves = candidates.moves();
    UnknownLookup* const begin = lookups->data() + first;
    UnknownLookup* const end = lookups->data() + lookups->size();
    const size_t most = log->candidates.size() + static_cast<size_t>(end - begin);
    if (most > log->candidates.capacity()) {
      log->candidates.reserve(std::max(most, 2 * log->candidates.size()));
    }
    const auto prepare = [&](UnknownLookup* one) __attribute__((always_inline)) {
      one->place = static_cast<int64_t>(candidates.home(one->id));
      candidates.prefetch(static_cast<uint64_t>(one->place));
    };
    const auto count_one = [&](UnknownLookup* unknown) __attribute__((always_inline)) {
      if (__builtin_expect(!candidates.has_room(), 0)) {
        reserve(1);
        for (UnknownLookup* one = unknown; one < end && one <= unknown + kCountDistance; ++one) {
          if (!one->known()) prepare(one);  // because rehashing changed the home positions
        }
      }
      const int64_t source = unknown->lookup + shift, id = unknown->id;
      const int64_t place = candidates.find_or_add(id, static_cast<uint64_t>(unknown->place));
      unknown->place = place;
      Candidates::Values values = candidates.get(place);
      if (values.count == 0 || values.last_use != now) log->candidates.push_back({id, values});
      values.count = saturated_sum(values.count, batch.shows_of(source));
      values.clicks = saturated_sum(values.clicks, batch.clicks_of(source));
      if (batch.timestamps != nullptr) values.timestamp = log->accepted(batch.timestamps[source], clock);
      values.last_use = now;
      candidates.set(place, values);
    };
    for_each_unknown(begin, end, prepare, count_one);
    if (candidates.moves() == moves) return;
    for (UnknownLookup& one : *lookups) {
      if (!one.known()) one.place = candidates.find(one.id);
    }
  }
  size_t accept(const LifecycleLog&, uint32_t slot, std::vector<UnknownLookup>* lookups,
                uint32_t* local) const noexcept override {
    const double threshold = threshold_, alpha = alpha_, beta = beta_;
    const auto fetch = [&](const UnknownLookup& one) {
      candidates.prefetch_near(static_cast<uint64_t>(one.place));
    };
    return accept_if(slot, lookups, local, fetch, [&](const UnknownLookup& one) {
      const Candidates::Values values = candidates.get(one.place);
      return alpha * values.count + beta * values.clicks >= threshold;
    });
  }
  void admit(LifecycleLog* log) noexcept override {
    std::vector<LifecycleLog::Admitted>& all = log->admitted;
    for (LifecycleLog::Admitted& one : all) one.values = candidates.get(one.place);
    for (size_t i = 0; i < all.size(); ++i) {
      if (i + kCountDistance < all.size()) {
        candidates.prefetch(candidates.home(all[i + kCountDistance].id));
      }
      candidates.erase(all[i].id);
    }
  }
  void undo(const LifecycleLog& log) noexcept override {
    for (auto before = log.candidates.rbegin(); before != log.candidates.rend(); ++before) {
      if (before->values.count == 0) {
        candidates.erase(before->id);
      } else {  // adding the id again cannot fail, because its space is still free
        candidates.set(candidates.find_or_add(before->id), before->values);
      }
    }
  }
  bool counts_each() const override { return true; }
  double worth(const Candidates::Values& values) const override {
    return alpha_ * values.count + beta_ * values.clicks;
  }
  bool set_candidates(const std::vector<LifecycleLog::Counted>& wanted) override {
    reserve(static_cast<int64_t>(wanted.size()));
    std::vector<int64_t> former;
    candidates.for_each([&](int64_t id, const Candidates::Values&) { former.push_back(id); });
    for (const int64_t id : former) candidates.erase(id);
    for (const LifecycleLog::Counted& one : wanted)
      candidates.set(candidates.find_or_add(one.id), one.values);
    return true;
  }

 private:
  void reserve(int64_t extra) {
    const int64_t bytes = candidates.growth(extra);
    if (bytes == 0) return;
    const auto growth = memory_->one_at_a_time();
    memory_->require(bytes, table_);
    candidates.reserve(extra);
  }

  const std::string table_;
  MemoryGuard* memory_;
  double threshold_, alpha_, beta_;
};

}  // namespace rec_sdk
