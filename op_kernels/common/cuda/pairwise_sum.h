// The order of aggregate.h's tree_sum, for the columns of one thread.
#pragma once

#include "op_kernels/common/cuda/vector.h"

namespace rec_sdk {
namespace cuda {

// Sums of blocks, or of whole subtrees of blocks, come in order and are combined pairwise, as a binary
// counter carries. A single sum leaves the stack untouched. In one of k levels 2^k sums fit; it is an object
// of its own, since it lies in local memory, and the rest need not.
template <int N>
class PairwiseSum {
 public:
  explicit __device__ __forceinline__ PairwiseSum(Columns<N>* stack) : stack_(stack) {}

  // Sum i of its size: after n sums of 2^k blocks, block n * 2^k may follow.
  __device__ __forceinline__ void push(int i, const Columns<N>& sum) {
    if (i > 0) stack_[depth_++] = top_;
    top_ = sum;
    for (int carry = i; carry & 1; carry >>= 1) add_left();
  }

  // Zeros if there was none.
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
