// The CUDA kernels, one function per operator. All are asynchronous on `stream`; the arguments hold device
// pointers and are already checked. An error is one of the launch: contents of indices are not checked.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "op_kernels/common/arguments.h"

namespace rec_sdk {
namespace cuda {

cudaError_t lookup_sequence(const LookupSequence& a, cudaStream_t stream);
cudaError_t lookup_pooled(const LookupPooled& a, cudaStream_t stream);
cudaError_t pooled_weights_grad(const PooledWeightsGrad& a, cudaStream_t stream);
// The rows of a copy may also be pinned host memory, which the device then reads or writes directly.
cudaError_t gather_rows(const CopyRows& a, cudaStream_t stream);
cudaError_t scatter_rows(const CopyRows& a, cudaStream_t stream);
cudaError_t swap_rows(const SwapRows& a, cudaStream_t stream);

// workspace: device memory of segments_workspace(segments) bytes, any contents; may be null when that is 0.
int64_t segments_workspace(const Segments& segments);
// cudaErrorInvalidValue for a name that is no optimizer.
cudaError_t update_rows(const UpdateRows& a, const char* optimizer, void* workspace, cudaStream_t stream);
cudaError_t accumulate_rows(const AccumulateRows& a, void* workspace, cudaStream_t stream);

}  // namespace cuda
}  // namespace rec_sdk
