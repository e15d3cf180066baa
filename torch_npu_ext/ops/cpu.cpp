#include "torch_npu_ext/ops/cpu.h"

#include <algorithm>

namespace rec_sdk {

namespace {

template <class T>
void check_offsets_of(const Checker& check, const char* name, const T* offsets, int64_t count, int64_t end) {
  check.require(offsets[0] == 0, name, " must start at 0, got ", offsets[0]);
  bool ascending = true;
  for (int64_t i = 0; i < count; ++i) ascending &= offsets[i] <= offsets[i + 1];
  for (int64_t i = 0; !ascending && i < count; ++i) {
    check.require(offsets[i] <= offsets[i + 1], name, " must not decrease, got ", offsets[i], " then ",
                  offsets[i + 1], " at index ", i + 1);
  }
  check.require(offsets[count] == end, name, " must end at ", end, ", got ", offsets[count]);
}

// Checks that values[j] is in [0, limit_of(gradient of lookup j)) for each lookup j. grad_source must have
// been checked.
template <class LimitOf>
void check_places(const Checker& check, const char* name, const int32_t* values, const Lookups& lookups,
                  const LimitOf& limit_of) {
  if (lookups.grad_source == nullptr) {
    return check_indices(check, name, values, lookups.count, limit_of(lookups.grad));
  }
  const auto good_at = [&](int64_t j) {
    return values[j] >= 0 && values[j] < limit_of(lookups.grads[lookups.grad_source[j]]);
  };
  std::atomic<bool> good{true};
  parallel_pieces(lookups.count, 1 << 16, [&](int64_t begin, int64_t end) {
    bool all = true;
    for (int64_t j = begin; j < end; ++j) all &= good_at(j);
    if (!all) good = false;
  });
  for (int64_t j = 0; !good && j < lookups.count; ++j) {
    const int32_t source = lookups.grad_source[j];
    check.require(good_at(j), name, " must be in [0, ", limit_of(lookups.grads[source]), ") for grads[",
                  source, "], got ", values[j], " at index ", j);
  }
}

// Checks that the hot segments passed by the caller match the offsets. The CPU kernels do not use them: they
// compute their own.
void check_hot_segments(const Checker& check, const Segments& segments) {
  int64_t i = 0, chunks = 0;
  for (int64_t u = 0; u < segments.rows; ++u) {
    const int64_t first = segments.offsets[u], lookups = segments.offsets[u + 1] - first;
    if (lookups <= kHotLookups) continue;
    check.require(i < segments.hot_segment_count, "hot_segments must have every segment of more than ",
                  kHotLookups, " lookups, or be None; the segment of row ", u, " is missing");
    const HotSegment& got = segments.hot_segments[i++];
    check.require(got.row == u && got.first_lookup == first && got.chunks == lookups / kHotLookups &&
                      got.chunks_before == chunks,
                  "hot_segments must be (row, first lookup, chunks, chunks before): ", u, ", ", first, ", ",
                  lookups / kHotLookups, ", ", chunks, " at index ", i - 1, ", got ", got.row, ", ",
                  got.first_lookup, ", ", got.chunks, ", ", got.chunks_before);
    chunks += got.chunks;
  }
  check.require(i == segments.hot_segment_count, "hot_segments must have the ", i, " segments of more than ",
                kHotLookups, " lookups, got ", segments.hot_segment_count);
}

}  // namespace

void check_indices(const Checker& check, const char* name, const int32_t* values, int64_t count,
                   int64_t limit) {
  const CpuKernels& kernels = cpu_kernels();
  const int64_t bound = std::min(limit, int64_t{1} << 31);  // larger numbers would be negative as int32
  std::atomic<bool> good{true};
  parallel_pieces(count, 1 << 17, [&](int64_t begin, int64_t end) {
    if (kernels.largest(values, begin, end) >= bound) good = false;
  });
  for (int64_t i = 0; !good && i < count; ++i) {
    check.require(values[i] >= 0 && values[i] < limit, name, " must be in [0, ", limit, "), got ", values[i],
                  " at index ", i);
  }
}

void check_offsets(const Checker& check, const char* name, const int32_t* offsets, int64_t count,
                   int64_t end) {
  check_offsets_of(check, name, offsets, count, end);
}

void check_offsets(const Checker& check, const char* name, const int64_t* offsets, int64_t count,
                   int64_t end) {
  check_offsets_of(check, name, offsets, count, end);
}

void check_bags(const Checker& check, const Bags& bags, int64_t features, int64_t lookups, int64_t dim,
                int64_t width) {
  check_offsets(check, "offsets", bags.offsets, bags.count, lookups);
  for (int64_t f = 0; f < features; ++f) {
    check.require(bags.columns[f] >= 0 && bags.columns[f] <= width - dim, "columns must be in [0, ",
                  width - dim, "] for slices of ", dim, " in ", width, " columns, got ", bags.columns[f],
                  " at index ", f);
  }
}

void check_segments(const Checker& check, const Segments& segments, int64_t slots, bool lists_hot) {
  const Lookups& lookups = segments.lookups;
  check_offsets(check, "segment_offsets", segments.offsets, segments.rows, lookups.count);
  if (lists_hot) check_hot_segments(check, segments);
  check_indices(check, "unique_slots", segments.unique_slots, segments.rows, slots);
  if (lookups.grad_source != nullptr) {
    check_indices(check, "grad_source", lookups.grad_source, lookups.count, lookups.grad_count);
  }
  check_places(check, "grad_row", lookups.grad_row, lookups, [](const Gradient& g) { return g.rows; });
  if (lookups.grad_column != nullptr) {
    const int64_t dim = segments.dim;
    check_places(check, "grad_column", lookups.grad_column, lookups,
                 [dim](const Gradient& g) { return g.columns - dim + 1; });
  }
}

HotRows::HotRows(Segments& segments) {
  for (int64_t u = 0; u < segments.rows; ++u) {
    const int64_t begin = segments.offsets[u], end = segments.offsets[u + 1];
    if (end - begin <= kChunkLookups) continue;
    rows_.push_back({u, static_cast<int64_t>(chunks_.size())});
    for (int64_t j = begin; j < end; j += kChunkLookups) {
      chunks_.push_back({j, std::min(j + kChunkLookups, end)});
    }
  }
  const int64_t count = static_cast<int64_t>(chunks_.size());
  sums_.resize(static_cast<size_t>(count * segments.dim));
  const SumChunks arguments{segments.lookups, segments.dim, chunks_.data(), sums_.data()};
  const CpuKernels& kernels = cpu_kernels();
  parallel_pieces(count, 1, [&](int64_t begin, int64_t end) { kernels.sum_chunks(arguments, begin, end); });
  segments.hot_rows = rows_.data();
  segments.hot_count = static_cast<int64_t>(rows_.size());
  segments.chunk_sums = sums_.data();
}

}  // namespace rec_sdk
