// Hot rows have more than kChunk lookups and are listed in the segments. Separate teams sum the whole chunks
// of hot rows before the rows are updated. The lookup numbers of a chunk contain exactly one multiple of
// kChunk, which determines the position of the chunk's sum.
#pragma once

#include "op_kernels/common/cuda/gradient_sums.h"

namespace rec_sdk {
namespace cuda {

// With fewer lookups, the additional launch would take longer than the sum of the longest possible row.
constexpr int64_t kLookupsWithoutChunks = 4 * kChunk;

// Returns the number of positions for chunk sums, or 0 if no rows are summed in chunks.
constexpr int64_t chunk_places(const Segments& segments) {
  const int64_t lookups = segments.lookups.count;
  const bool chunks = segments.hot_segment_count > 0 && lookups > kLookupsWithoutChunks;
  return chunks ? (lookups + kChunk - 1) / kChunk : 0;
}

// Returns the index of the last of `count` ascending numbers at(i) that is at most `value`, or 0.
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

// Returns the hot segment that contains a chunk, given by its number among all chunks; the last hot segment
// if the number is too large.
__device__ __forceinline__ HotSegment segment_of(const Segments& segments, int chunk) {
  const HotSegment* all = segments.hot_segments;
  return all[last_at_most([all](int i) { return all[i].chunks_before; }, segments.hot_segment_count, chunk)];
}

// Sums one chunk per team. sums: [places, dim], where the number of places is at least the number of chunks.
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

// Launches the sums of the chunks of hot rows, if there are any, and sets segments->chunk_sums.
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
