#include "torch_npu_ext/engine/life/admission.h"

namespace rec_sdk {
namespace {

constexpr int64_t kPrefetchDistance = 16;

}  // namespace

void count_candidates(Table* table, const Batch& batch, const Batch::Piece& piece, UnknownLookup* begin,
                      UnknownLookup* end, LifeLog* log) {
  const int64_t shift = piece.source - piece.begin;
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
  const LifeSpec& life = table.spec().life;
  const Candidates::Values values = table.candidates.get(candidate.candidate);
  if (life.score(values.count, values.clicks) < life.threshold) return false;
  const bool first = !table.map().find(candidate.id, IdMap::hash(candidate.id));
  if (first) log->admitted.push_back({candidate.id, values});
  return true;
}

void remove_admitted(Table* table, const LifeLog& log) noexcept {
  for (const LifeLog::Counted& admitted : log.admitted) table->candidates.erase(admitted.id);
}

void undo_candidates(Table* table, const LifeLog& log) noexcept {
  for (auto before = log.candidates.rbegin(); before != log.candidates.rend(); ++before) {
    if (before->values.count == 0) {
      table->candidates.erase(before->id);
    } else {  // into the room that it had
      table->candidates.set(table->candidates.find_or_add(before->id), before->values);
    }
  }
}

}  // namespace rec_sdk
