#include "torch_npu_ext/engine/life/admission.h"

namespace rec_sdk {
namespace {

constexpr int64_t kPrefetchDistance = 16;
constexpr int64_t kNoPlace = 0;  // of a candidate without one of its own

void count_in_sketch(Table* table, const Batch& batch, int64_t shift, UnknownLookup* begin,
                     UnknownLookup* end, LifeLog* log) {
  CountSketch& sketch = table->sketch;
  const size_t room = static_cast<size_t>(sketch.shape().depth);
  for (UnknownLookup* unknown = begin; unknown < end; ++unknown) {
    if (end - unknown > kPrefetchDistance) {
      const int64_t ahead = unknown[kPrefetchDistance].id;
      table->map().prefetch(IdMap::hash(ahead));
      sketch.prefetch(ahead);
    }
    unknown->candidate = UnknownLookup::kKnown;
    if (table->map().find(unknown->id, IdMap::hash(unknown->id))) continue;
    unknown->candidate = kNoPlace;
    if (log->sketch.capacity() - log->sketch.size() < room) {
      log->sketch.reserve(2 * log->sketch.size() + 16 * room);
    }
    const uint32_t shows = batch.shows_of(unknown->lookup + shift);
    sketch.add(unknown->id, shows, &log->sketch);
    log->sketched += shows;
  }
}

// Where chance decides, nothing is counted.
void find_unknown(const Table& table, UnknownLookup* begin, UnknownLookup* end) {
  for (UnknownLookup* unknown = begin; unknown < end; ++unknown) {
    if (end - unknown > kPrefetchDistance) {
      table.map().prefetch(IdMap::hash(unknown[kPrefetchDistance].id));
    }
    const bool known = static_cast<bool>(table.map().find(unknown->id, IdMap::hash(unknown->id)));
    unknown->candidate = known ? UnknownLookup::kKnown : kNoPlace;
  }
}

Candidates::Values counted(const Table& table, const UnknownLookup& candidate) {
  if (table.has_candidates()) return table.candidates.get(candidate.candidate);
  const uint32_t count = table.sketch.any() ? table.sketch.estimate(candidate.id) : 0;
  return {count, static_cast<uint32_t>(table.clock.batches), 0, 0};
}

bool admits(const Table& table, int64_t id, const Candidates::Values& values) {
  const LifeSpec& life = table.spec().life;
  if (life.probability > 0) return table.coin.toss(id, table.clock.batches, life.probability);
  return life.score(values.count, values.clicks) >= life.threshold;
}

}  // namespace

void count_candidates(Table* table, const Batch& batch, const Batch::Piece& piece, UnknownLookup* begin,
                      UnknownLookup* end, LifeLog* log) {
  const int64_t shift = piece.source - piece.begin;
  if (!table->spec().life.counts_candidates()) return find_unknown(*table, begin, end);
  if (table->sketch.any()) return count_in_sketch(table, batch, shift, begin, end, log);
  const uint32_t now = static_cast<uint32_t>(table->clock.batches);
  for (UnknownLookup* unknown = begin; unknown < end; ++unknown) {
    if (end - unknown > kPrefetchDistance) {
      const int64_t ahead = unknown[kPrefetchDistance].id;
      table->map().prefetch(IdMap::hash(ahead));
      table->candidates.prefetch(ahead);
    }
    const int64_t source = unknown->lookup + shift, id = unknown->id;
    unknown->candidate = UnknownLookup::kKnown;
    if (table->map().find(id, IdMap::hash(id))) continue;
    table->reserve_candidates(1);
    if (log->candidates.size() == log->candidates.capacity()) {
      log->candidates.reserve(2 * log->candidates.size() + 64);
    }
    const int64_t place = table->candidates.find_or_add(id);
    unknown->candidate = place;
    Candidates::Values values = table->candidates.get(place);
    if (values.count == 0 || values.last_use != now) log->candidates.push_back({id, values});
    values.count = saturated_sum(values.count, batch.shows_of(source));
    values.clicks = saturated_sum(values.clicks, batch.clicks_of(source));
    if (batch.timestamps != nullptr) {
      values.timestamp = log->believed(batch.timestamps[source], table->clock);
    }
    values.last_use = now;
    table->candidates.set(place, values);
  }
}

bool admit(const Table& table, const UnknownLookup& candidate, LifeLog* log) {
  const Candidates::Values values = counted(table, candidate);
  if (!admits(table, candidate.id, values)) return false;
  const bool first = !table.map().find(candidate.id, IdMap::hash(candidate.id));
  if (first) log->admitted.push_back({candidate.id, values});
  return true;
}

void remove_admitted(Table* table, const LifeLog& log) noexcept {
  if (!table->has_candidates()) return;  // the cells of a sketch count others too
  for (const LifeLog::Counted& admitted : log.admitted) table->candidates.erase(admitted.id);
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
