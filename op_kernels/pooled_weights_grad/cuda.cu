#include <cuda_runtime.h>

#include <cstdint>

#include "op_kernels/common/bags.h"
#include "op_kernels/common/convert.h"
#include "op_kernels/common/cuda/kernels.h"
#include "op_kernels/common/cuda/launch.h"
#include "op_kernels/common/cuda/vector.h"

namespace rec_sdk {
namespace cuda {
namespace {

using REC_SDK_ISA::bag_of;
using REC_SDK_ISA::BagCursor;
using REC_SDK_ISA::Float32;
using REC_SDK_ISA::with_format;

// A team of four threads holds the 16 lanes of lane_sum, four neighbouring lanes in each thread.
constexpr int kWidth = 4;
constexpr int kLanes = kWidth * kVector;
constexpr int kRounds = 4;  // rounds of 16 columns that are loaded at once

constexpr int kBlocksPerProcessor = 4;        // 64 registers, for kRounds rounds
constexpr int64_t kTeams = int64_t{1} << 16;  // about as many as a large device runs at once
constexpr int64_t kMostLookups = 32;          // maximum number of lookups of a team

// The gradient slice of a bag.
struct Slice {
  int64_t bag, end;
  const float* grad;
  bool mean;

  __device__ __forceinline__ Slice(const PooledWeightsGrad& a, int64_t bag_index)
      : bag(bag_index), end(__ldg(a.bags.offsets + bag + 1)) {
    const BagCursor cursor(a.bags, bag);
    grad = a.grad + cursor.sample * a.grad_stride + cursor.column();
    mean = cursor.mean();
  }
};

// Returns the bag of lookup j, which is after bag `before`. It is often the next bag, but many empty bags may
// lie in between.
__device__ __forceinline__ int64_t bag_behind(const Bags& bags, int64_t before, int64_t j) {
  return j < __ldg(bags.offsets + before + 2) ? before + 1 : bag_of(bags, j, before + 1);
}

// Adds the products of kRoundsNow rounds from `column` on to the lanes of this thread, without a branch
// between the loads.
template <class Format, int kRoundsNow>
__device__ __forceinline__ void add_rounds(const float* grad, const typename Format::Storage* row,
                                           int64_t column, Columns<kVector>& lanes) {
  Packed<Format, kVector> weights[kRoundsNow];
  Packed<Float32, kVector> grads[kRoundsNow];
#pragma unroll
  for (int r = 0; r < kRoundsNow; ++r) {
    weights[r] = load_constant<Format, kVector>(row + column + r * kLanes);
    grads[r] = load_constant<Float32, kVector>(grad + column + r * kLanes);
  }
#pragma unroll
  for (int r = 0; r < kRoundsNow; ++r) {
    const Columns<kVector> g = grads[r].unpack(), w = weights[r].unpack();
#pragma unroll
    for (int k = 0; k < kVector; ++k) lanes[k] += g[k] * w[k];
  }
}

template <class Format>
__device__ __forceinline__ Columns<kVector> sum_vectors(const float* grad,
                                                        const typename Format::Storage* row, int64_t dim,
                                                        int64_t column) {
  Columns<kVector> lanes{};
#pragma unroll 1
  for (; column + (kRounds - 1) * kLanes < dim; column += kRounds * kLanes) {
    add_rounds<Format, kRounds>(grad, row, column, lanes);
  }
#pragma unroll 1
  for (; column < dim; column += kLanes) add_rounds<Format, 1>(grad, row, column, lanes);
  return lanes;
}

template <class Format>
__device__ __forceinline__ Columns<kVector> sum_elements(const float* grad,
                                                         const typename Format::Storage* row, int64_t dim,
                                                         int64_t column) {
  Columns<kVector> lanes{};
#pragma unroll 1
  for (; column < dim; column += kLanes) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      if (column + k < dim) lanes[k] += __ldg(grad + column + k) * Format::load(__ldg(row + column + k));
    }
  }
  return lanes;
}

// Adds the lanes as lane_sum does at its end: lane l + lane l + 8, + 4, + 2, + 1. Only the result of the
// team's first thread is valid.
__device__ __forceinline__ float sum_lanes(Columns<kVector> lanes, unsigned mask) {
#pragma unroll
  for (int threads = kWidth / 2; threads > 0; threads /= 2) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) lanes[k] += __shfl_down_sync(mask, lanes[k], threads, kWidth);
  }
  return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

template <class Format>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerProcessor)
    dot_rows(const __grid_constant__ PooledWeightsGrad a, int64_t lookups_per_team, bool vectors) {
  const Team team(kWidth);
  const int64_t begin = team.index * lookups_per_team;
  const int64_t end = begin + lookups_per_team < a.lookups ? begin + lookups_per_team : a.lookups;
  if (begin >= end) return;
  Slice slice(a, bag_of(a.bags, begin));
  int32_t slot = __ldg(a.slots + begin);
#pragma unroll 1
  for (int64_t j = begin; j < end; ++j) {
    if (j >= slice.end) slice = Slice(a, bag_behind(a.bags, slice.bag, j));
    const auto* const row = row_of<Format>(a.weights, slot);
    if (j + 1 < end) slot = __ldg(a.slots + j + 1);
    const int64_t column = team.lane * kVector;
    const bool whole = vectors && is_multiple(slice.grad, kBytes<Float32, kVector>);
    const Columns<kVector> lanes = whole ? sum_vectors<Format>(slice.grad, row, a.weights.dim, column)
                                         : sum_elements<Format>(slice.grad, row, a.weights.dim, column);
    const float dot = sum_lanes(lanes, team.mask);
    if (team.lane != 0) continue;
    const int64_t length = slice.end - __ldg(a.bags.offsets + slice.bag);
    a.out[j] = slice.mean ? dot / static_cast<float>(length) : dot;
  }
}

}  // namespace

cudaError_t pooled_weights_grad(const PooledWeightsGrad& a, cudaStream_t stream) {
  const int64_t share = (a.lookups + kTeams - 1) / kTeams;
  const int64_t lookups_per_team = share < 1 ? 1 : share > kMostLookups ? kMostLookups : share;
  const int64_t teams = (a.lookups + lookups_per_team - 1) / lookups_per_team;
  cudaError_t error = cudaSuccess;
  with_format(a.weights.dtype, [&](auto format) {
    using Format = decltype(format);
    error = launch(dot_rows<Format>, blocks_of(teams, kWidth), stream, a, lookups_per_team,
                   in_vectors<Format>(a.weights));
  });
  return error;
}

}  // namespace cuda
}  // namespace rec_sdk
