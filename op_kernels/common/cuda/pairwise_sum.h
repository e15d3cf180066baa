// Pairwise sums in the order of tree_sum in aggregate.h, for the columns of one thread.
#pragma once

#include "op_kernels/common/cuda/vector.h"

namespace rec_sdk {
namespace cuda {

// Combines sums of blocks, or of whole subtrees of blocks, pairwise like the carries of a binary counter. The
// sums are pushed in order. A single sum does not use the stack. A stack of k levels is enough for 2^k sums.
// The caller provides it, because the stack lies in local memory and the other members may be in registers.
template <int N>
class PairwiseSum {
 public:
  explicit __device__ __forceinline__ PairwiseSum(Columns<N>* stack) : stack_(stack) {}

  // Adds the sum with index i, counted in sums of its size. After n sums of 2^k blocks, the next sum may be
  // the single block n * 2^k.
  __device__ __forceinline__ void push(int i, const Columns<N>& sum) {
    if (i > 0) stack_[depth_++] = top_;
    top_ = sum;
    for (int carry = i; carry & 1; carry >>= 1) add_left();
  }

  // Returns the sum of all pushed sums, or zeros if none was pushed.
  __device__ __forceinline__ Columns<N> total() {
    while (depth_ > 0) add_left();
    return top_;
  }

 private:
  __device__ __forceinline__ void add_left() {
    Columns<N> left = stack_[--depth_];
    left += top_;
    top_ = left;
  }

  Columns<N>* stack_;
  Columns<N> top_{};
  int depth_ = 0;
};

}  // namespace cuda
}  // namespace rec_sdk
