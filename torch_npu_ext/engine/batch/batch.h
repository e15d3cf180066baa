// Batches: the arrays of a caller, and their validated lookups in the features of one group.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rec_sdk {

// A caller's int32 or int64 array.
struct IntArray {
  const void* data = nullptr;
  bool wide = true;  // int64
  int64_t size = 0;

  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// The arrays of a KeyedJaggedTensor: bag (key k, sample b) is values[offsets[k*B + b] : offsets[k*B + b +
// 1]].
struct BatchInput {
  IntArray values;         // [lookups of all keys]
  IntArray offsets;        // [K*B + 1]
  IntArray feature_keys;   // [F] the key that each feature of the group reads
  int64_t batch_size = 0;  // B
  bool weighted = false;   // whether the lookups of bags have weights
  bool joined = false;     // whether the features of a sequence share one gradient, one feature after another
  // [lookups of all keys] or null: the signals of each lookup, for tables that admit or evict ids.
  const int32_t* shows = nullptr;  // how often the id was shown; once if null
  const int32_t* clicks = nullptr;
  const int64_t* timestamps = nullptr;
  const int64_t* latest =
      nullptr;  // [K] the latest timestamp of each key; computed from `timestamps` if null
};

// Throws std::invalid_argument unless the offsets start at 0, never decrease, and match the keys and the
// batch size. If `check_values`, the last offset must also be the number of values.
void check_batch(const BatchInput& input, int64_t features, bool check_values);

// The lookups of a range of the group's bags, ordered by feature, then sample.
struct Batch {
  struct Piece {  // consecutive bags of one feature
    int64_t feature;
    int64_t source;      // index of its first lookup in the batch's values
    int64_t begin, end;  // range of lookups, counted from the first one of this batch
    int64_t first_bag;   // counted from the first of this batch
    int64_t first_sample;
    int64_t bags;
  };
  IntArray values;
  bool weighted = false, joined = false;
  const int32_t* shows = nullptr;  // signals are indexed like the values
  const int32_t* clicks = nullptr;
  const int64_t* timestamps = nullptr;
  const int64_t* latest = nullptr;  // by key
  IntArray feature_keys;
  // Converts a label to a number of shows, at least 1: labels may be negative for "unknown".
  static uint32_t shows_in(int32_t label) { return label < 1 ? 1 : static_cast<uint32_t>(label); }
  static uint32_t clicks_in(int32_t label) { return label < 0 ? 0 : static_cast<uint32_t>(label); }
  uint32_t shows_of(int64_t source) const { return shows == nullptr ? 1 : shows_in(shows[source]); }
  uint32_t clicks_of(int64_t source) const { return clicks == nullptr ? 0 : clicks_in(clicks[source]); }
  int64_t bags = 0;
  int64_t lookups = 0;
  std::vector<Piece> pieces;
};

// Fills `batch` with bags [bag_begin, bag_end), reusing its memory. Throws std::invalid_argument for 2^31
// lookups or more.
void slice_batch(const BatchInput& input, int64_t features, int64_t bag_begin, int64_t bag_end, Batch* batch);

// Writes the offsets [batch.bags + 1] of the batch's bags, starting at 0.
void write_offsets(const BatchInput& input, const Batch& batch, int64_t* offsets);

// Returns boundaries 0 = b0 < b1 < ... = F*B that split the bags into runs. A run has at most `max_lookups`
// lookups, unless it is a single bag.
std::vector<int64_t> bag_ranges(const BatchInput& input, int64_t features, int64_t max_lookups);

}  // namespace rec_sdk
