#include <cuda_runtime.h>

#include "op_kernels/accumulate_rows/two_sum.h"
#include "op_kernels/common/cuda/kernels.h"
#include "op_kernels/common/cuda/update_records.h"

namespace rec_sdk {
namespace cuda {
namespace {

// Accumulation as an optimizer: the pending sum is the weight, and its compensation is an element state.
struct Accumulate : REC_SDK_ISA::ElementwiseOptimizer {
  static constexpr int kElementStates = 1;

  explicit __device__ __forceinline__ Accumulate(const float*) {}

  __device__ __forceinline__ void element(float& sum, float* states, float g, REC_SDK_ISA::NoValues) const {
    REC_SDK_ISA::two_sum(sum, states[0], g);
  }
};

}  // namespace

cudaError_t accumulate_rows(const AccumulateRows& a, void* workspace, cudaStream_t stream) {
  const int64_t dim = a.segments.dim;
  UpdateRows rows{};
  rows.segments = a.segments;
  rows.cache = reinterpret_cast<uint8_t*>(a.pending);
  rows.layout = make_record_layout(dim, DType::kFloat32, &dim, 1);
  rows.layout.bytes = dim * 8;  // without padding
  rows.slots = a.slots;
  return update_with<Accumulate, Float32>(rows, workspace, stream);
}

}  // namespace cuda
}  // namespace rec_sdk
