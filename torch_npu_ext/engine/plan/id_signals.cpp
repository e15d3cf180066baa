#include "torch_npu_ext/engine/plan/id_signals.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>

#include "torch_npu_ext/engine/plan/unique.h"

namespace rec_sdk {
namespace {

constexpr uint32_t kMost = std::numeric_limits<int32_t>::max();  // sums are sent and planned as int32

int64_t read_one(const SignalKinds& kinds, const int32_t* words, IdSignals* signals) {
  const int32_t* const begin = words;
  if (kinds.shows) signals->shows = static_cast<uint32_t>(*words++);
  if (kinds.clicks) signals->clicks = static_cast<uint32_t>(*words++);
  if (kinds.timestamp) {
    std::memcpy(&signals->timestamp, words, sizeof(int64_t));
    words += 2;
  }
  if (kinds.feature) signals->feature = *words++;
  return words - begin;
}

struct Occurrence {
  int64_t id;
  int32_t feature;
  int64_t place;  // index among the received ids, which are ordered by rank
};

void keep_last(std::vector<Occurrence>* sights, std::vector<int64_t>* timestamps) {
  std::sort(sights->begin(), sights->end(), [](const Occurrence& a, const Occurrence& b) {
    return std::tie(a.id, a.feature, a.place) < std::tie(b.id, b.feature, b.place);
  });
  for (size_t begin = 0, end = 0; begin < sights->size(); begin = end) {
    while (end < sights->size() && (*sights)[end].id == (*sights)[begin].id) ++end;
    const int64_t last = (*timestamps)[static_cast<size_t>((*sights)[end - 1].place)];
    for (size_t i = begin; i < end; ++i) (*timestamps)[static_cast<size_t>((*sights)[i].place)] = last;
  }
}

}  // namespace

int64_t write_signals(const SignalKinds& kinds, const IdSignals& signals, int32_t* words) noexcept {
  int32_t* const begin = words;
  if (kinds.shows) *words++ = static_cast<int32_t>(std::min(signals.shows, kMost));
  if (kinds.clicks) *words++ = static_cast<int32_t>(std::min(signals.clicks, kMost));
  if (kinds.timestamp) {
    std::memcpy(words, &signals.timestamp, sizeof(int64_t));
    words += 2;
  }
  if (kinds.feature) *words++ = signals.feature;
  return words - begin;
}

ReceivedSignals read_signals(const SharedTables& shared, const int64_t* counts, const int64_t* ids,
                             int64_t id_count, const int32_t* words, int64_t word_count) {
  const size_t tables = shared.tables.size();
  int64_t expected_ids = 0, expected_words = 0;
  for (size_t i = 0; i < static_cast<size_t>(shared.ranks) * tables; ++i) {
    expected_ids += counts[i];
    expected_words += counts[i] * shared.tables[i % tables].signals.words();
  }
  if (expected_ids != id_count || expected_words != word_count) {
    throw std::invalid_argument("the counts require " + std::to_string(expected_ids) + " ids and " +
                                std::to_string(expected_words) + " words, got " + std::to_string(id_count) +
                                " and " + std::to_string(word_count));
  }
  const SignalKinds any = shared.any_signals();
  ReceivedSignals result;
  const size_t size = static_cast<size_t>(id_count);
  if (any.shows) result.shows.assign(size, 1);
  if (any.clicks) result.clicks.assign(size, 0);
  if (any.timestamp) result.timestamps.assign(size, 0);
  std::vector<std::vector<Occurrence>> sights(tables);
  int64_t place = 0;
  for (size_t i = 0; i < static_cast<size_t>(shared.ranks) * tables; ++i) {
    const SignalKinds& kinds = shared.tables[i % tables].signals;
    for (const int64_t end = place + counts[i]; place < end; ++place) {
      IdSignals one;
      words += read_one(kinds, words, &one);
      const size_t at = static_cast<size_t>(place);
      if (kinds.shows) result.shows[at] = static_cast<int32_t>(one.shows);
      if (kinds.clicks) result.clicks[at] = static_cast<int32_t>(one.clicks);
      if (kinds.timestamp) result.timestamps[at] = one.timestamp;
      if (kinds.feature) sights[i % tables].push_back({ids[place], one.feature, place});
    }
  }
  for (std::vector<Occurrence>& own : sights) keep_last(&own, &result.timestamps);
  return result;
}

}  // namespace rec_sdk
