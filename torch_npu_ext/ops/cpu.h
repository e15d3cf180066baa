// Functions for the CPU kernels of all operators: threads, and checks of tensors' contents, which only host
// memory allows without a copy.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "op_kernels/common/cpu_kernels.h"
#include "torch_npu_ext/ops/check.h"

namespace rec_sdk {

// Calls work(begin, end) for pieces of [0, count) on torch's threads. A thread that has finished a piece
// takes the next piece, so an expensive piece or a busy core does not delay the other pieces.
template <class Work>
void parallel_pieces(int64_t count, int64_t piece, const Work& work) {
  const int64_t threads = torch::stable::get_num_threads();
  if (count <= piece || threads == 1) {
    if (count > 0) work(int64_t{0}, count);
    return;
  }
  std::atomic<int64_t> next{0};
  const auto worker = [&](int64_t, int64_t) {
    for (int64_t begin = next.fetch_add(piece); begin < count; begin = next.fetch_add(piece)) {
      work(begin, begin + piece < count ? begin + piece : count);
    }
  };
  torch::stable::parallel_for(0, threads, 1, worker);
}

// Returns the number of items, of `bytes` bytes each, in a piece that is large enough to run on a thread of
// its own.
inline int64_t piece_of(int64_t bytes) {
  constexpr int64_t kPieceBytes = 256 * 1024;
  return bytes < kPieceBytes ? kPieceBytes / (bytes > 0 ? bytes : 1) : 1;
}

// Checks that values[i] is in [0, limit) for all i.
void check_indices(const Checker& check, const char* name, const int32_t* values, int64_t count,
                   int64_t limit);

// Checks that offsets [count + 1] start at 0, never decrease, and end at `end`.
void check_offsets(const Checker& check, const char* name, const int32_t* offsets, int64_t count,
                   int64_t end);
void check_offsets(const Checker& check, const char* name, const int64_t* offsets, int64_t count,
                   int64_t end);

// Checks that each feature's columns [column, column + dim) are inside a matrix with `width` columns, and
// checks the bags' offsets like check_offsets.
void check_bags(const Checker& check, const Bags& bags, int64_t features, int64_t lookups, int64_t dim,
                int64_t width);

// Checks that the victims are numbered 0, 1, ... in the order of the slots.
void check_victim_indices(const Checker& check, const int32_t* victim_indices, int64_t count,
                          int64_t victims);

// These functions run CPU kernels on torch's threads.
void scatter_on_cpu(const CopyRows& a);
void swap_on_cpu(const SwapRows& a);
void lookup_sequence_on_cpu(const LookupSequence& a);
void lookup_pooled_on_cpu(const LookupPooled& a);

// Checks the segments' contents. lists_hot: whether the caller passed hot segments, which must match the
// offsets.
void check_segments(const Checker& check, const Segments& segments, int64_t slots, bool lists_hot);

// The summed gradients of hot rows, computed by the constructor. `segments` then points to memory of this
// object.
class HotRows {
 public:
  explicit HotRows(Segments& segments);

 private:
  std::vector<HotRow> rows_;
  std::vector<Chunk> chunks_;
  std::vector<float> sums_;
};

// Calls work(begin, end, scratch [dim]) for ranges of unique rows that access about the same number of bytes.
template <class Work>
void parallel_rows(const Segments& segments, int64_t record_bytes, const Work& work) {
  // cost_before(u) is the cost of all rows before row u, in units of one gradient row. It increases with u,
  // so a range of costs corresponds to a range of rows.
  const int64_t row_cost = 1 + record_bytes / (segments.dim * 4);
  const auto cost_before = [&](int64_t u) { return segments.offsets[u] + u * row_cost; };
  const auto first_row = [&](int64_t cost) {
    int64_t low = 0, high = segments.rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (cost_before(middle) < cost) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  const int64_t total = cost_before(segments.rows);
  parallel_pieces(total, piece_of(segments.dim * 4), [&](int64_t begin, int64_t end) {
    const int64_t first = first_row(begin), last = first_row(end);
    if (first == last) return;
    std::vector<float> scratch(static_cast<size_t>(segments.dim));
    work(first, last, scratch.data());
  });
}

}  // namespace rec_sdk
