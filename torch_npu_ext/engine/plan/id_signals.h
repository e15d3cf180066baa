// The signals of an id (shows, clicks, timestamp), which a rank sends to the id's owner rank, for tables that
// admit or evict ids.
#pragma once

#include <cstdint>
#include <vector>

namespace rec_sdk {

struct SharedTables;

// Which signals are sent with the ids of a table.
struct SignalKinds {
  bool shows = false, clicks = false, timestamp = false;
  bool feature = false;  // the feature of the last lookup, if a table has several features

  int64_t words() const { return int64_t{shows} + clicks + 2 * timestamp + feature; }
};

// The signals of one distinct id on one rank.
struct IdSignals {
  uint32_t shows = 0, clicks = 0;
  int64_t timestamp = 0;
  int32_t feature = 0;
};

// Writes the signals of one id as int32 words, and returns their number, kinds.words().
int64_t write_signals(const SignalKinds& kinds, const IdSignals& signals, int32_t* words) noexcept;

// The decoded signals of all received ids, [id_count] each. An array is empty if no table uses the signal.
struct ReceivedSignals {
  std::vector<int32_t> shows, clicks;
  std::vector<int64_t> timestamps;
};

// Decodes received signals. counts [W, T] are the numbers of ids per sending rank and table, for ids
// [id_count] and words [word_count]. An id that several ranks sent gets the timestamp of its last lookup in
// the joint batch of all ranks, which is ordered by feature, then rank. Throws std::invalid_argument for
// sizes that do not match.
ReceivedSignals read_signals(const SharedTables& shared, const int64_t* counts, const int64_t* ids,
                             int64_t id_count, const int32_t* words, int64_t word_count);

}  // namespace rec_sdk
