#include "torch_npu_ext/engine/life/admission.h"

#include <algorithm>

namespace rec_sdk {
namespace {

constexpr int64_t kPrefetchDistance = 16;

// Room for so many more.
template <class Item>
void reserve_more(std::vector<Item>* items, int64_t more) {
  const size_t needed = items->size() + static_cast<size_t>(more);
  if (needed > items->capacity()) items->reserve(std::max(needed, 2 * items->size()));
}

// prepare(lookup), and later count(lookup), of those that are not known.
template <class Prepare, class Count>
REC_SDK_ALWAYS_INLINE void for_each_unknown(UnknownLookup* begin, UnknownLookup* end, const Prepare& prepare,
                                            const Count& count) {
  const auto prepare_if = [&](UnknownLookup* unknown) __attribute__((always_inline)) {
    if (unknown->candidate != UnknownLookup::kKnown) prepare(unknown);
  };
  for (UnknownLookup* one = begin; one < end && one < begin + kPrefetchDistance; ++one) prepare_if(one);
  for (UnknownLookup* one = begin; one < end; ++one) {
    if (end - one > kPrefetchDistance) prepare_if(one + kPrefetchDistance);
    if (one->candidate != UnknownLookup::kKnown) count(one);
  }
}

void count_each(Table* table, const Batch& batch, int64_t shift, UnknownLookup* begin, UnknownLookup* end,
                LifeLog* log) {
  const LifeClock clock = table->clock;
  const uint32_t now = static_cast<uint32_t>(clock.batches);
  Candidates& candidates = table->candidates;
  reserve_more(&log->candidates, end - begin);
  const auto prepare = [&](UnknownLookup* unknown) __attribute__((always_inline)) {
    unknown->candidate = static_cast<int64_t>(candidates.home(unknown->id));
    candidates.prefetch(static_cast<uint64_t>(unknown->candidate));
  };
  const auto count = [&](UnknownLookup* unknown) __attribute__((always_inline)) {
    if (__builtin_expect(!candidates.has_room(), 0)) {
      table->reserve_candidates(1);
      for (UnknownLookup* one = unknown; one < end && one <= unknown + kPrefetchDistance; ++one) {
        if (one->candidate != UnknownLookup::kKnown) prepare(one);  // homes have moved
      }
    }
    const int64_t source = unknown->lookup + shift, id = unknown->id;
    const int64_t place = candidates.find_or_add(id, static_cast<uint64_t>(unknown->candidate));
    unknown->candidate = place;
    Candidates::Values values = candidates.get(place);
    if (values.count == 0 || values.last_use != now) log->candidates.push_back({id, values});
    values.count = saturated_sum(values.count, batch.shows_of(source));
    values.clicks = saturated_sum(values.clicks, batch.clicks_of(source));
    if (batch.timestamps != nullptr) values.timestamp = log->believed(batch.timestamps[source], clock);
    values.last_use = now;
    candidates.set(place, values);
  };
  for_each_unknown(begin, end, prepare, count);
}

void count_in_sketch(Table* table, const Batch& batch, int64_t shift, UnknownLookup* begin,
                     UnknownLookup* end, LifeLog* log) {
  CountSketch& sketch = table->sketch;
  const int64_t depth = sketch.shape().depth;
  const int64_t unknown_lookups = std::count_if(
      begin, end, [](const UnknownLookup& one) { return one.candidate != UnknownLookup::kKnown; });
  int64_t next = static_cast<int64_t>(sketch.extend(unknown_lookups, &log->sketch));
  uint64_t* const cells = log->sketch.cells.data();
  uint32_t* const before = log->sketch.before.data();
  const auto prepare = [&](UnknownLookup* unknown) __attribute__((always_inline)) {
    unknown->candidate = next;
    sketch.find(unknown->id, cells + next);
    sketch.prefetch(cells + next);
    next += depth;
  };
  const auto count = [&](UnknownLookup* unknown) __attribute__((always_inline)) {
    const uint32_t shows = batch.shows_of(unknown->lookup + shift);
    sketch.add(cells + unknown->candidate, shows, before + unknown->candidate);
    log->sketched += shows;
  };
  for_each_unknown(begin, end, prepare, count);
}

// Where chance decides, nothing is counted.
void toss_coins(const Table& table, UnknownLookup* begin, UnknownLookup* end) {
  const Coin coin = table.coin;
  const uint64_t batch = table.clock.batches;
  const double probability = table.spec().life.probability;
  for (UnknownLookup* unknown = begin; unknown < end; ++unknown) {
    if (unknown->candidate == UnknownLookup::kKnown) continue;
    unknown->candidate = coin.toss(unknown->id, batch, probability) ? 1 : 0;
  }
}

}  // namespace

void count_candidates(Table* table, const Batch& batch, const Batch::Piece& piece, UnknownLookup* begin,
                      UnknownLookup* end, LifeLog* log) {
  const int64_t shift = piece.source - piece.begin;
  if (!table->spec().life.counts_candidates()) {
    toss_coins(*table, begin, end);
  } else if (table->sketch.any()) {
    count_in_sketch(table, batch, shift, begin, end, log);
  } else {
    count_each(table, batch, shift, begin, end, log);
  }
}

void remove_admitted(Table* table, const LifeLog& log) noexcept {
  if (!table->has_candidates()) return;  // the cells of a sketch count others too
  Candidates& candidates = table->candidates;
  const std::vector<LifeLog::Admitted>& all = log.admitted;
  const size_t distance = kPrefetchDistance;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i + distance < all.size()) candidates.prefetch(candidates.home(all[i + distance].id));
    candidates.erase(all[i].id);
  }
}

void undo_candidates(Table* table, const LifeLog& log) noexcept {
  table->sketch.undo(log.sketch, log.sketched);
  for (auto before = log.candidates.rbegin(); before != log.candidates.rend(); ++before) {
    if (before->values.count == 0) {
      table->candidates.erase(before->id);
    } else {  // into the room that it had
      table->candidates.set(table->candidates.find_or_add(before->id), before->values);
    }
  }
}

}  // namespace rec_sdk
