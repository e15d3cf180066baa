// The aggregated gradient of a row, in the order of aggregate.h: lookups one after the other in blocks of
// kBlock, block sums pairwise, like the carries of a binary counter.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "op_kernels/common/aggregate.h"
#include "op_kernels/common/arguments.h"
#include "op_kernels/common/convert.h"
#include "op_kernels/common/cuda/launch.h"
#include "op_kernels/common/cuda/pairwise_sum.h"
#include "op_kernels/common/cuda/vector.h"

namespace rec_sdk {
namespace cuda {

using REC_SDK_ISA::Float32;

// Rows with more lookups are hot: other teams sum their whole chunks first (hot_rows.h).
constexpr int kChunk = static_cast<int>(kHotLookups);
constexpr int kBlock = REC_SDK_ISA::kBlock;
constexpr int kBlocksPerChunk = kChunk / kBlock;

static_assert(kChunk % kBlock == 0 && (kBlocksPerChunk & (kBlocksPerChunk - 1)) == 0,
              "a chunk must be a whole subtree, or chunked sums would differ from the serial ones");

// Returns the position of the sum of the chunk that starts at a lookup: a chunk contains exactly one multiple
// of kChunk.
__device__ __forceinline__ int64_t chunk_place(int64_t first) { return (first + kChunk - 1) / kChunk; }

// A range of lookups. Its ends are 32-bit numbers, like the offsets, to save registers.
struct LookupRange {
  int first, last;
};

// Sums gradients in a team; each thread sums N neighbouring columns.
template <int N>
class GradientSums {
 public:
  __device__ __forceinline__ GradientSums(const Segments& segments, const Team& team)
      : segments_(segments), lookups_(segments.lookups), team_(team) {}

  // Sums columns [column, column + N); all threads of the team must call it. `active`: whether these columns
  // are in the row. Returns zeros for an empty segment.
  __device__ __forceinline__ Columns<N> sum(const LookupRange& segment, int column, bool active) const {
    const int count = segment.last - segment.first;
    const int chunks = segments_.chunk_sums != nullptr && count > kChunk ? count / kChunk : 0;
    Columns<N> stack[REC_SDK_ISA::kLevels];
    PairwiseSum<N> total(stack);
    if (chunks > 0) add_chunks(segment.first, chunks, column, active, &total);
    LookupRange block{segment.first + chunks * kChunk, 0};
    for (int i = chunks * kBlocksPerChunk; block.first < segment.last; ++i) {
      block.last = block.first + smaller(kBlock, segment.last - block.first);
      total.push(i, sum_block(block, column, active));
      block.first = block.last;
    }
    return total.total();
  }

 private:
  static constexpr int kAhead = 4;  // gradients loaded at once; the width of every team is a multiple of it

  struct Lookup {
    int64_t
        start;  // start of its gradient, in floats from lookups.grad; an address would take more registers
    float scale;
  };

  static __device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }

  __device__ __forceinline__ int64_t start_of_row(int64_t j) const {
    const int64_t row = lookups_.grad_row[j];
    if (lookups_.grad_source == nullptr) return row * lookups_.grad.stride;
    const Gradient* from = lookups_.grads + lookups_.grad_source[j];
    const int64_t bytes =
        reinterpret_cast<int64_t>(from->data) - reinterpret_cast<int64_t>(lookups_.grad.data);
    return bytes / 4 + row * from->stride;
  }

  __device__ __forceinline__ Lookup lookup(int64_t j) const {
    const int64_t column = lookups_.grad_column != nullptr ? lookups_.grad_column[j] : 0;
    return {start_of_row(j) + column, lookups_.scale != nullptr ? lookups_.scale[j] : 1.0f};
  }

  // Sums at most kBlock lookups, one after the other. The lanes load their indices together.
  __device__ __forceinline__ Columns<N> sum_block(const LookupRange& block, int column, bool active) const {
    Columns<N> sum = nothing();
    for (int first = block.first; first < block.last; first += team_.width) {
      const int count = smaller(team_.width, block.last - first);
      const Lookup mine = team_.lane < count ? lookup(first + team_.lane) : Lookup{0, 1.0f};
      for (int lane = 0; lane < count; lane += kAhead) {
        add_some(mine, lane, active ? count - lane : 0, lookups_.grad.data + column, &sum);
      }
    }
    return sum;
  }

  // Returns -0. Adding it does not change the bits of a term or a sum.
  static __device__ __forceinline__ Columns<N> nothing() {
    Columns<N> columns;
    for (int k = 0; k < N; ++k) columns[k] = -0.0f;
    return columns;
  }

  // Adds the lookups of kAhead lanes from `lane` on, or of `count` lanes if `count` is smaller. Additions are
  // unconditional, because the compiler would otherwise move each load after the previous addition.
  __device__ __forceinline__ void add_some(const Lookup& mine, int lane, int count, const float* grad,
                                           Columns<N>* sum) const {
    const float* from[kAhead];
    float scales[kAhead];
    Columns<N> terms[kAhead];
    bool aligned = true;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      from[i] = grad + __shfl_sync(team_.mask, mine.start, lane + i, team_.width);
      scales[i] = __shfl_sync(team_.mask, mine.scale, lane + i, team_.width);
      aligned = aligned && (is_multiple(from[i], kBytes<Float32, N>) || i >= count);
      terms[i] = nothing();
    }
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i < count) terms[i] = load_constant<Float32, N>(from[i]).unpack();
      }
    } else {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i < count) terms[i] = load_constant_anywhere<N>(from[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      for (int k = 0; k < N; ++k) (*sum)[k] += scales[i] * terms[i][k];
    }
  }

  __device__ __forceinline__ void add_chunks(int first, int chunks, int column, bool active,
                                             PairwiseSum<N>* total) const {
    const float* sums = segments_.chunk_sums + chunk_place(first) * segments_.dim + column;
    for (int i = 0; i < chunks; i += kAhead) {
      Columns<N> terms[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        terms[k] = nothing();
        if (active && i + k < chunks) {
          terms[k] = load_constant<Float32, N>(sums + (i + k) * segments_.dim).unpack();
        }
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (i + k < chunks) total->push(i + k, terms[k]);
      }
    }
  }

  const Segments& segments_;
  const Lookups& lookups_;
  const Team& team_;
};

}  // namespace cuda
}  // namespace rec_sdk
