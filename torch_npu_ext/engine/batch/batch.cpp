#include "torch_npu_ext/engine/batch/batch.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace rec_sdk {
namespace {

template <class T>
void check_order(const T* offsets, int64_t count) {
  bool ordered = true;
  for (int64_t i = 0; i + 1 < count; ++i)
    ordered &= offsets[i + 1] >= offsets[i];  // no early exit, so that the loop is vectorized
  for (int64_t i = 0; !ordered && i + 1 < count; ++i) {
    if (offsets[i + 1] < offsets[i]) {
      throw std::invalid_argument("offsets must not decrease: offsets[" + std::to_string(i) + "] is " +
                                  std::to_string(offsets[i]) + ", offsets[" + std::to_string(i + 1) +
                                  "] is " + std::to_string(offsets[i + 1]));
    }
  }
}

template <class T>
void add_to_all(const T* values, int64_t count, int64_t shift, int64_t* sums) {
  for (int64_t i = 0; i < count; ++i) sums[i] = values[i] + shift;
}

void check_offsets(const IntArray& offsets, int64_t values_size) {
  if (offsets.size < 1) throw std::invalid_argument("offsets is empty; it needs K*B + 1 entries");
  if (offsets[0] != 0) {
    throw std::invalid_argument("offsets must start at 0, got " + std::to_string(offsets[0]));
  }
  if (offsets.wide) {
    check_order(static_cast<const int64_t*>(offsets.data), offsets.size);
  } else {
    check_order(static_cast<const int32_t*>(offsets.data), offsets.size);
  }
  const int64_t last = offsets[offsets.size - 1];
  if (values_size >= 0 && last != values_size) {
    throw std::invalid_argument("offsets must end at the number of ids, " + std::to_string(values_size) +
                                ", got " + std::to_string(last));
  }
}

}  // namespace

void check_batch(const BatchInput& input, int64_t features, bool check_values) {
  check_offsets(input.offsets, check_values ? input.values.size : -1);
  const int64_t bags = input.offsets.size - 1;
  const int64_t batch_size = input.batch_size;
  if (input.feature_keys.size != features) {
    throw std::invalid_argument("feature_keys must have one entry per feature, " + std::to_string(features) +
                                ", got " + std::to_string(input.feature_keys.size));
  }
  if (batch_size < 0 || (batch_size == 0 ? bags != 0 : bags % batch_size != 0)) {
    throw std::invalid_argument("batch_size " + std::to_string(batch_size) +
                                " does not fit offsets of length " + std::to_string(bags + 1) +
                                "; it needs K*B + 1 entries");
  }
  const int64_t keys = batch_size == 0 ? std::numeric_limits<int64_t>::max() : bags / batch_size;
  for (int64_t f = 0; f < features; ++f) {
    const int64_t key = input.feature_keys[f];
    if (key < 0 || key >= keys) {
      throw std::invalid_argument("feature_keys[" + std::to_string(f) + "] is " + std::to_string(key) +
                                  ", but offsets of length " + std::to_string(bags + 1) +
                                  " with batch_size " + std::to_string(batch_size) + " hold " +
                                  std::to_string(keys) + " keys");
    }
  }
}

void slice_batch(const BatchInput& input, int64_t features, int64_t bag_begin, int64_t bag_end,
                 Batch* batch) {
  const int64_t batch_size = input.batch_size;
  if (bag_begin < 0 || bag_begin > bag_end || bag_end > features * batch_size) {
    throw std::invalid_argument("bags [" + std::to_string(bag_begin) + ", " + std::to_string(bag_end) +
                                ") are not within the " + std::to_string(features * batch_size) +
                                " of the batch");
  }
  batch->values = input.values;
  batch->weighted = input.weighted;
  batch->joined = input.joined;
  batch->shows = input.shows;
  batch->clicks = input.clicks;
  batch->timestamps = input.timestamps;
  batch->latest = input.latest;
  batch->feature_keys = input.feature_keys;
  batch->bags = bag_end - bag_begin;
  batch->lookups = 0;
  batch->pieces.clear();
  for (int64_t bag = bag_begin; bag < bag_end;) {
    const int64_t feature = bag / batch_size;
    const int64_t end = std::min(bag_end, (feature + 1) * batch_size);
    const int64_t input_bag = input.feature_keys[feature] * batch_size + bag % batch_size;
    const int64_t source = input.offsets[input_bag];
    const int64_t length = input.offsets[input_bag + end - bag] - source;
    batch->pieces.push_back({feature, source, batch->lookups, batch->lookups + length, bag - bag_begin,
                             bag % batch_size, end - bag});
    batch->lookups += length;
    bag = end;
  }
  if (batch->lookups > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("a batch may have fewer than 2^31 lookups, got " +
                                std::to_string(batch->lookups) + "; use a smaller batch");
  }
}

void write_offsets(const BatchInput& input, const Batch& batch, int64_t* offsets) {
  offsets[0] = 0;
  for (const Batch::Piece& piece : batch.pieces) {
    const int64_t first = input.feature_keys[piece.feature] * input.batch_size + piece.first_sample + 1;
    const int64_t shift = piece.begin - piece.source;
    int64_t* const to = offsets + piece.first_bag + 1;
    if (input.offsets.wide) {
      add_to_all(static_cast<const int64_t*>(input.offsets.data) + first, piece.bags, shift, to);
    } else {
      add_to_all(static_cast<const int32_t*>(input.offsets.data) + first, piece.bags, shift, to);
    }
  }
}

std::vector<int64_t> bag_ranges(const BatchInput& input, int64_t features, int64_t max_lookups) {
  const int64_t batch_size = input.batch_size;
  std::vector<int64_t> boundaries = {0};
  int64_t lookups = 0;
  for (int64_t bag = 0; bag < features * batch_size; ++bag) {
    const int64_t input_bag = input.feature_keys[bag / batch_size] * batch_size + bag % batch_size;
    const int64_t length = input.offsets[input_bag + 1] - input.offsets[input_bag];
    if (lookups + length > max_lookups && bag > boundaries.back()) {
      boundaries.push_back(bag);
      lookups = 0;
    }
    lookups += length;
  }
  if (features * batch_size > 0) boundaries.push_back(features * batch_size);
  return boundaries;
}

}  // namespace rec_sdk
