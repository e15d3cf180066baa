// The norms of the gradients of rows, which an update counts where it is asked to.
#pragma once

#include "op_kernels/common/cuda/gradient_sums.h"
#include "op_kernels/common/cuda/lane_sum.h"

namespace rec_sdk {
namespace cuda {

// The norms of one row, by its team: the bits of the CPU.
template <int N>
class RowNorms {
 public:
  // Further columns, zeros behind the last of the row.
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
  // Magnitudes are ordered as their bits are, and NaN is above all.
  __device__ __forceinline__ void take(int32_t bits) { largest_ = largest_ < bits ? bits : largest_; }

  LaneSum<N> squares_;
  int32_t largest_ = 0;
};

// Sums the gradients of the team's row once more, behind its update: that has just read them, so that they
// are in caches, and no accumulators take registers from it.
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
