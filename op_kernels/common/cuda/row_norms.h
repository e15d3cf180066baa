// The norms of the gradients of rows, which an update computes on request.
#pragma once

#include "op_kernels/common/cuda/gradient_sums.h"
#include "op_kernels/common/cuda/lane_sum.h"

namespace rec_sdk {
namespace cuda {

// Computes the norms of one row's gradient in a team, with the same bits as the CPU.
template <int N>
class RowNorms {
 public:
  // Adds the next columns; they must be zero after the end of the row.
  __device__ __forceinline__ void add(const Team& team, const Columns<N>& g) {
    Columns<N> squares;
    for (int k = 0; k < N; ++k) {
      squares[k] = g[k] * g[k];
      int32_t bits;
      memcpy(&bits, &g[k], sizeof(bits));
      take(bits & INT32_MAX);
    }
    squares_.add(team, squares);
  }
  __device__ __forceinline__ void store(const Team& team, float* squares, float* largest) {
    for (int half = team.width / 2; half > 0; half /= 2) {
      take(__shfl_xor_sync(team.mask, largest_, half, team.width));
    }
    const float sum = squares_.total(team);
    if (team.lane != 0) return;
    *squares = sum;
    memcpy(largest, &largest_, sizeof(largest_));
  }

 private:
  // Updates the largest magnitude. The bits of magnitudes are compared as integers, so NaN is the largest.
  __device__ __forceinline__ void take(int32_t bits) { largest_ = largest_ < bits ? bits : largest_; }

  LaneSum<N> squares_;
  int32_t largest_ = 0;
};

// Sums the gradients of the team's row again after its update, and stores their norms. The update has just
// read the gradients, so they are in the caches. Computing the norms during the update would take registers
// from it.
template <int N>
__device__ __forceinline__ void count_norms(const Segments& segments, float* norms, int width) {
  const Team team(width);
  const int u = static_cast<int>(team.index);
  const LookupRange segment{segments.offsets[u], segments.offsets[u + 1]};
  const GradientSums<N> sums(segments, team);
  const int dim = static_cast<int>(segments.dim);
  RowNorms<N> of_row;
  for (int start = 0; start < dim; start += width * N) {
    const int column = start + team.lane * N;
    Columns<N> g = sums.sum(segment, column, column < dim);
    for (int k = 0; k < N; ++k) g[k] = column < dim ? g[k] : 0.0f;
    of_row.add(team, g);
  }
  of_row.store(team, norms + u, norms + segments.rows + u);
}

}  // namespace cuda
}  // namespace rec_sdk
