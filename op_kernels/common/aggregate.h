// Sums in a fixed order. Terms are added one after the other in blocks of kBlock; the block sums are combined
// pairwise, like the carries of a binary counter. The result depends bit for bit only on the terms and their
// order, and the error grows with kBlock + log2(n / kBlock) instead of n (Higham, Accuracy and Stability of
// Numerical Algorithms, section 4.2).
#pragma once

#include <cstdint>
#include <cstring>

#include "op_kernels/common/arguments.h"
#include "op_kernels/common/isa.h"
#include "op_kernels/common/numbers.h"
#include "op_kernels/common/prefetch.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

constexpr int64_t kBlock = 32;
constexpr int64_t kTile = 128;   // columns summed together; bounds the stack below
constexpr int64_t kLevels = 28;  // 2^31 terms are 2^26 blocks

static_assert(kChunkLookups % kBlock == 0 && ((kChunkLookups / kBlock) & (kChunkLookups / kBlock - 1)) == 0,
              "a chunk must be a whole subtree, or chunked sums would differ from the serial ones");

constexpr int64_t tile_width(int64_t fixed_dim) { return fixed_dim > 0 ? fixed_dim : kTile; }

REC_SDK_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Computes out[k] = the sum over leaves i = 0 .. leaves - 1, where leaf(i, column, width, acc) writes its sum
// of those columns to acc. leaves >= 1; kDim is dim, or 0 if it is known only at run time.
template <int64_t kDim, class Leaf>
REC_SDK_INLINE void tree_sum(int64_t leaves, int64_t dim, const Leaf& leaf, float* __restrict out) {
  constexpr int64_t kWidth = tile_width(kDim);
  for (int64_t column = 0; column < dim; column += kWidth) {
    const int64_t width = kDim > 0 ? kDim : smaller(kWidth, dim - column);
    if (leaves == 1) {
      leaf(0, column, width, out + column);
      continue;
    }
    float stack[kLevels][kWidth];
    int64_t depth = 0;
    const auto fold = [&] {  // left + right
      --depth;
      float* __restrict left = stack[depth - 1];
      const float* __restrict right = stack[depth];
      for (int64_t k = 0; k < width; ++k) left[k] += right[k];
    };
    for (int64_t i = 0; i < leaves; ++i) {
      leaf(i, column, width, stack[depth++]);
      for (int64_t carry = i; carry & 1; carry >>= 1) fold();
    }
    while (depth > 1) fold();
    for (int64_t k = 0; k < width; ++k) out[column + k] = stack[0][k];
  }
}

// Computes out = the sum of terms [begin, end), begin < end. Terms is a class with row(j, column), which is
// indexable by column, and prefetch(j).
template <int64_t kDim, class Terms>
REC_SDK_INLINE void pairwise_sum(const Terms& terms, int64_t begin, int64_t end, int64_t dim, float* out) {
  const auto block = [&](int64_t i, int64_t column, int64_t width, float* __restrict acc) {
    const int64_t first = begin + i * kBlock, last = smaller(first + kBlock, end);
    float sum[tile_width(kDim)];  // a local array, so that a fixed width stays in registers
    terms.prefetch(first);
    const auto start = terms.row(first, column);
    for (int64_t k = 0; k < width; ++k) sum[k] = start[k];
    for (int64_t j = first + 1; j < last; ++j) {
      terms.prefetch(j);
      const auto row = terms.row(j, column);
      for (int64_t k = 0; k < width; ++k) sum[k] += row[k];
    }
    for (int64_t k = 0; k < width; ++k) acc[k] = sum[k];
  };
  tree_sum<kDim>((end - begin + kBlock - 1) / kBlock, dim, block, out);
}

constexpr int64_t kLanes = 16;

// Returns the sum of 16 lanes; each step adds the upper half of the lanes to the lower half. Written without
// a loop, because GCC 12 would keep the lanes of a loop in memory, at a cost of a hundred instructions per
// row.
REC_SDK_INLINE float sum_of_lanes(const float* lanes) {
  typedef float Quad __attribute__((vector_size(16)));
  Quad quads[kLanes / 4];
  memcpy(quads, lanes, kLanes * sizeof(float));
  const Quad four = (quads[0] + quads[2]) + (quads[1] + quads[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Sums over a row in 16 lanes; lane l adds columns l, l + 16, ... This order does not depend on the vector
// width. terms(k) returns the Numbers of column k, each of which is summed.
template <class Terms>
REC_SDK_INLINE auto lane_sums(int64_t dim, const Terms& terms) {
  using Sums = decltype(terms(dim));
  float lanes[Sums::kCount][kLanes] = {};
  const auto add = [&](int64_t k, int64_t l) {
    const Sums numbers = terms(k + l);
    for (int i = 0; i < Sums::kCount; ++i) lanes[i][l] += numbers.each[i];
  };
  int64_t k = 0;
  for (; k + kLanes <= dim; k += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) add(k, l);
  }
  for (int64_t l = 0; k + l < dim; ++l) add(k, l);
  Sums sums;
  for (int i = 0; i < Sums::kCount; ++i) sums.each[i] = sum_of_lanes(lanes[i]);
  return sums;
}

template <class Term>
REC_SDK_INLINE float lane_sum(int64_t dim, const Term& term) {
  return lane_sums(dim, [&](int64_t k) { return Numbers<float, 1>{{term(k)}}; }).each[0];
}

// The gradients of lookups as terms of a sum. kScaled: each gradient is multiplied by its lookup's scale.
// kMany: the gradients are in several tensors.
template <bool kScaled, bool kMany>
struct GradientTerms {
  const Lookups& lookups;
  int64_t row_bytes;
  int64_t ahead;

  struct Row {
    const float* __restrict data;
    float scale;
    REC_SDK_INLINE float operator[](int64_t k) const { return kScaled ? scale * data[k] : data[k]; }
  };

  REC_SDK_INLINE GradientTerms(const Lookups& all, int64_t dim)
      : lookups(all), row_bytes(dim * 4), ahead(rows_ahead(dim * 4)) {}

  REC_SDK_INLINE const float* address(int64_t j) const {
    const int64_t column = lookups.grad_column != nullptr ? lookups.grad_column[j] : 0;
    const Gradient& from = kMany ? lookups.grads[lookups.grad_source[j]] : lookups.grad;
    return from.data + lookups.grad_row[j] * from.stride + column;
  }
  REC_SDK_INLINE Row row(int64_t j, int64_t column) const {
    return {address(j) + column, kScaled ? lookups.scale[j] : 1.0f};
  }
  REC_SDK_INLINE void prefetch(int64_t j) const {
    if (j + ahead < lookups.count) prefetch_row(address(j + ahead), row_bytes);
  }
};

template <int64_t kDim, bool kMany>
REC_SDK_INLINE void sum_terms(const Lookups& lookups, int64_t begin, int64_t end, int64_t dim, float* out) {
  if (lookups.scale != nullptr) {
    pairwise_sum<kDim>(GradientTerms<true, kMany>(lookups, dim), begin, end, dim, out);
  } else {
    pairwise_sum<kDim>(GradientTerms<false, kMany>(lookups, dim), begin, end, dim, out);
  }
}

// Sums gradients of several tensors. A separate function, so that the case of one tensor does not pay for it.
template <int64_t kDim>
__attribute__((noinline)) void sum_lookups_of_many(const Lookups& lookups, int64_t begin, int64_t end,
                                                   int64_t dim, float* out) {
  sum_terms<kDim, true>(lookups, begin, end, dim, out);
}

inline __attribute__((noinline)) const float* single_of_many(const Lookups& lookups, int64_t j, int64_t dim) {
  const GradientTerms<false, true> terms(lookups, dim);
  terms.prefetch(j);
  return terms.address(j);
}

// Computes the sum of the gradients of lookups [begin, end), begin < end. Not inlined, because all optimizers
// and formats share it.
template <int64_t kDim>
__attribute__((noinline)) void sum_lookups(const Lookups& lookups, int64_t begin, int64_t end, int64_t dim,
                                           float* out) {
  if (lookups.grad_source != nullptr) return sum_lookups_of_many<kDim>(lookups, begin, end, dim, out);
  sum_terms<kDim, false>(lookups, begin, end, dim, out);
}

// The second pass over a hot row: combines its chunk sums in the order of sum_lookups.
template <int64_t kDim>
__attribute__((noinline)) void sum_of_chunks(const float* chunk_sums, int64_t chunks, int64_t dim,
                                             float* out) {
  const auto copy = [&](int64_t i, int64_t column, int64_t width, float* __restrict acc) {
    const float* __restrict chunk = chunk_sums + i * dim + column;
    for (int64_t k = 0; k < width; ++k) acc[k] = chunk[k];
  };
  tree_sum<kDim>(chunks, dim, copy, out);
}

REC_SDK_INLINE int64_t first_hot_row(const Segments& segments, int64_t row) {
  int64_t low = 0, high = segments.hot_count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (segments.hot_rows[middle].row < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls visit(u, record, g) for the unique rows [begin, end), where g [dim] is the row's aggregated gradient
// (zeros for an empty segment) and record = base + slot * record_bytes. scratch: [dim].
template <int64_t kDim, class Visit>
REC_SDK_INLINE void for_each_row(const Segments& segments, uint8_t* base, int64_t record_bytes, int64_t begin,
                                 int64_t end, float* scratch, const Visit& visit) {
  const int64_t dim = kDim > 0 ? kDim : segments.dim;
  const Lookups lookups = segments.lookups;
  const GradientTerms<false, false> single(lookups, dim);
  const int64_t ahead = rows_ahead(record_bytes);
  const int64_t fetched = prefetch_bytes(base, record_bytes, record_bytes);
  const auto record = [&](int64_t u) { return base + segments.unique_slots[u] * record_bytes; };
  int64_t hot = first_hot_row(segments, begin);
  for (int64_t u = begin; u < smaller(begin + ahead, end); ++u) prefetch_row(record(u), fetched);
  for (int64_t u = begin; u < end; ++u) {
    if (u + ahead < end) prefetch_row(record(u + ahead), fetched);
    const int64_t first = segments.offsets[u], last = segments.offsets[u + 1], count = last - first;
    const float* g = scratch;
    if (count == 1 && lookups.scale == nullptr) {
      if (lookups.grad_source == nullptr) {
        single.prefetch(first);
        g = single.address(first);
      } else {
        g = single_of_many(lookups, first, dim);
      }
    } else if (hot < segments.hot_count && segments.hot_rows[hot].row == u) {
      const float* chunks = segments.chunk_sums + segments.hot_rows[hot++].first_chunk * dim;
      sum_of_chunks<kDim>(chunks, (count + kChunkLookups - 1) / kChunkLookups, dim, scratch);
    } else if (count > 0) {
      sum_lookups<kDim>(lookups, first, last, dim, scratch);
    } else {
      for (int64_t k = 0; k < dim; ++k) scratch[k] = 0;
    }
    visit(u, record(u), g);
  }
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
