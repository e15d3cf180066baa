#include "torch_npu_ext/host/admission.h"

namespace rec_sdk {
namespace {

constexpr size_t kPrefetchDistance = 16;

}  // namespace

void count_candidates(Table* table, const Batch& batch, const Batch::Piece& piece,
                      const std::vector<int64_t>& places, LifeLog* log) {
  const int64_t shift = piece.source - piece.begin;
  const uint32_t now = static_cast<uint32_t>(table->clock.batches);
  for (size_t k = 0; k < places.size(); ++k) {
    if (k + kPrefetchDistance < places.size()) {
      const int64_t ahead = batch.values[places[k + kPrefetchDistance] + shift];
      table->map().prefetch(IdMap::hash(ahead));
      table->candidates.prefetch(ahead);
    }
    const int64_t source = places[k] + shift, id = batch.values[source];
    if (table->map().find(id, IdMap::hash(id))) continue;
    table->reserve_candidates(1);
    if (log->candidates.size() == log->candidates.capacity()) {
      log->candidates.reserve(2 * log->candidates.size() + 64);
    }
    const int64_t place = table->candidates.find_or_add(id);
    Candidates::Values values = table->candidates.get(place);
    if (values.count == 0 || values.last_use != now) log->candidates.push_back({id, values});
    values.count = saturated_sum(values.count, batch.shows_of(source));
    values.clicks = saturated_sum(values.clicks, batch.clicks_of(source));
    if (batch.timestamps != nullptr) values.timestamp = batch.timestamps[source];
    values.last_use = now;
    table->candidates.set(place, values);
  }
}

bool admit(Table* table, int64_t id, LifeLog* log) {
  const LifeSpec& life = table->spec().life;
  const int64_t place = table->candidates.find(id);
  const Candidates::Values values = table->candidates.get(place);
  if (life.score(values.count, values.clicks) < life.threshold) return false;
  log->admitted.push_back({id, values});
  table->candidates.erase(id);
  return true;
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
