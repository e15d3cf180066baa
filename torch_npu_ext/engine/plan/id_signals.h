// Numbers that a rank sends to an id's home beside the id, in tables that admit or evict ids.
#pragma once

#include <cstdint>
#include <vector>

namespace rec_sdk {

struct SharedTables;

// Which numbers the ids of a table take along.
struct SignalKinds {
  bool shows = false, clicks = false, timestamp = false;
  bool feature = false;  // with timestamps of several features: which one had the id last

  int64_t words() const { return int64_t{shows} + clicks + 2 * timestamp + feature; }
};

// The numbers of one distinct id, on one rank.
struct IdSignals {
  uint32_t shows = 0, clicks = 0;
  int64_t timestamp = 0;
  int32_t feature = 0;
};

// Writes kinds.words() words; gives how many those are.
int64_t write_signals(const SignalKinds& kinds, const IdSignals& signals, int32_t* words) noexcept;

// The numbers of the ids that all ranks sent; empty where no table has such.
struct ReceivedSignals {
  std::vector<int32_t> shows, clicks;
  std::vector<int64_t> timestamps;
};

// counts [W, T], ids [id_count], words [word_count]. An id that several ranks have gets the timestamp of its
// last lookup in the batch of all ranks, by feature, then rank. Throws std::invalid_argument for sizes that
// do not fit.
ReceivedSignals read_signals(const SharedTables& shared, const int64_t* counts, const int64_t* ids,
                             int64_t id_count, const int32_t* words, int64_t word_count);

}  // namespace rec_sdk
