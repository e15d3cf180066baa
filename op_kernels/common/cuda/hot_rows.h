// Hot rows, those with more than kChunk lookups, which the segments list: their whole chunks are summed by
// teams of their own before the rows are updated. A chunk contains exactly one multiple of kChunk as the
// number of a lookup: this says where its sum is kept.
#pragma once

#include "op_kernels/common/cuda/gradient_sums.h"

namespace rec_sdk {
namespace cuda {

// Up to here the launch takes longer than the longest row can.
constexpr int64_t kLookupsWithoutChunks = 4 * kChunk;

// The places of chunk sums; 0: rows are not summed in chunks.
constexpr int64_t chunk_places(const Segments& segments) {
  const int64_t lookups = segments.lookups.count;
  const bool chunks = segments.hot_segment_count > 0 && lookups > kLookupsWithoutChunks;
  return chunks ? (lookups + kChunk - 1) / kChunk : 0;
}

// The place of the last of `count` ascending numbers at(i) that is at most `value`, or 0.
template <class At>
__device__ __forceinline__ int last_at_most(const At& at, int64_t count, int value) {
  int low = 0, high = static_cast<int>(count);
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (at(middle) <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The hot segment that a chunk is of, by its number among the chunks of all; behind them: the last.
__device__ __forceinline__ HotSegment segment_of(const Segments& segments, int chunk) {
  const HotSegment* all = segments.hot_segments;
  return all[last_at_most([all](int i) { return all[i].chunks_before; }, segments.hot_segment_count, chunk)];
}

// A team per chunk: at most one per place. sums: [places, dim].
template <int N>
__global__ void __launch_bounds__(kBlockThreads)
    sum_chunks(const __grid_constant__ Segments segments, float* sums, int64_t places, int width) {
  const Team team(width);
  if (team.index >= places) return;
  const int chunk = static_cast<int>(team.index), dim = static_cast<int>(segments.dim);
  const HotSegment hot = segment_of(segments, chunk);
  const int of_segment = chunk - hot.chunks_before;
  if (of_segment >= hot.chunks) return;
  const int begin = hot.first_lookup + of_segment * kChunk;
  const GradientSums<N> gradients(segments, team);
  for (int start = 0; start < dim; start += width * N) {
    const int column = start + team.lane * N;
    const Columns<N> sum = gradients.sum({begin, begin + kChunk}, column, column < dim);
    if (column < dim) store<Float32>(sums + chunk_place(begin) * dim + column, sum);
  }
}

// Sums the chunks of the hot rows, if there are any, and says in the segments where.
template <int N>
cudaError_t launch_sum_chunks(Segments* segments, void* workspace, cudaStream_t stream) {
  segments->chunk_sums = nullptr;
  const int64_t places = chunk_places(*segments);
  if (places == 0) return cudaSuccess;
  const int width = team_width(segments->dim, N);
  float* sums = static_cast<float*>(workspace);
  const cudaError_t error =
      launch(sum_chunks<N>, blocks_of(places, width), stream, *segments, sums, places, width);
  segments->chunk_sums = sums;
  return error;
}

}  // namespace cuda
}  // namespace rec_sdk
