// Computes lane_sum of aggregate.h in a team. Each lane l of 16 adds columns l, l + 16, ... one after the
// other. Then the upper half of the lanes is added to the lower half, until one lane is left.
#pragma once

#include <cuda_runtime.h>

#include "op_kernels/common/cuda/launch.h"
#include "op_kernels/common/cuda/vector.h"

namespace rec_sdk {
namespace cuda {

// Every thread stores the lanes of its columns, so each lane is stored more than once.
template <int N>
class LaneSum {
 public:
  // Adds the terms of the next team.width * N columns; terms after the end of the row must be zero.
  __device__ __forceinline__ void add(const Team& team, const Columns<N>& terms) {
    for (int first = 0; first < team.width; first += kThreads) {
      for (int k = 0; k < N; ++k) {
        lanes_[k] += __shfl_sync(team.mask, terms[k], first + team.lane % kThreads, team.width);
      }
    }
  }

  // Returns the sum over the row in every thread of the team.
  __device__ __forceinline__ float total(const Team& team) {
    // A team with fewer threads has no more lanes than columns.
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (half >= team.width) continue;
      for (int k = 0; k < N; ++k) {
        lanes_[k] += __shfl_xor_sync(team.mask, lanes_[k], half, team.width);
      }
    }
    for (int half = N / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) lanes_[k] += lanes_[k + half];
    }
    return lanes_[0];
  }

 private:
  static constexpr int kLanes = 16;
  static constexpr int kThreads = kLanes / N;  // threads that hold all lanes once

  Columns<N> lanes_{};
};

}  // namespace cuda
}  // namespace rec_sdk
