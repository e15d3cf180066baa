// Hot rows, those with more than kChunk lookups: their whole chunks are summed by teams of their own before
// the rows are updated. The segments are known to the device only. A chunk contains exactly one multiple of
// kChunk as the number of a lookup: this says which team sums it, and where the sum is kept.
#pragma once

#include "op_kernels/common/cuda/gradient_sums.h"

namespace rec_sdk {
namespace cuda {

// Up to here the launch takes longer than the longest row can.
constexpr int64_t kLookupsWithoutChunks = 4 * kChunk;

constexpr int64_t chunk_places(int64_t lookups) {
  return lookups > kLookupsWithoutChunks ? (lookups + kChunk - 1) / kChunk : 0;
}

// The last of `count` ascending numbers that is at most `value`, or the first.
__device__ __forceinline__ int last_at_most(const int32_t* ascending, int64_t count, int value) {
  int low = 0, high = static_cast<int>(count);
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (ascending[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A team per place. sums: [places, dim].
template <int N>
__global__ void __launch_bounds__(kBlockThreads)
    sum_chunks(const __grid_constant__ Segments segments, float* sums, int64_t places, int width) {
  const Team team(width);
  if (team.index >= places) return;
  const int lookup = static_cast<int>(team.index * kChunk), dim = static_cast<int>(segments.dim);
  const int row = last_at_most(segments.offsets, segments.rows, lookup);
  const int first = segments.offsets[row], last = segments.offsets[row + 1];
  const int begin = first + (lookup - first) / kChunk * kChunk;
  if (last - first <= kChunk || last - begin < kChunk) return;
  const GradientSums<N> gradients(segments, team);
  for (int start = 0; start < dim; start += width * N) {
    const int column = start + team.lane * N;
    const Columns<N> sum = gradients.sum({begin, begin + kChunk}, column, column < dim);
    if (column < dim) store<Float32>(sums + team.index * dim + column, sum);
  }
}

// Sums the chunks of the hot rows, where there can be any, and says in the segments where.
template <int N>
cudaError_t launch_sum_chunks(Segments* segments, void* workspace, cudaStream_t stream) {
  segments->chunk_sums = nullptr;
  const int64_t places = chunk_places(segments->lookups.count);
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
