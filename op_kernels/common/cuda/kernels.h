// The CUDA kernels, one function per operator. All are asynchronous on `stream`; the arguments hold device
// pointers and are already checked. Only launch errors are returned: the values of indices are not checked.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "op_kernels/common/arguments.h"
#include "op_kernels/common/operators.h"

namespace rec_sdk {
namespace cuda {

// `rows` and `victims` of a copy may also be pinned host memory, which the device accesses directly.
#define REC_SDK_LAUNCH(name, Arguments) cudaError_t name(const Arguments& a, cudaStream_t stream);
REC_SDK_OPERATORS(REC_SDK_LAUNCH)
#undef REC_SDK_LAUNCH

// workspace: device memory of segments_workspace(segments) bytes with any contents; may be null if that is 0.
int64_t segments_workspace(const Segments& segments);
// Returns cudaErrorInvalidValue for an unknown optimizer name.
cudaError_t update_rows(const UpdateRows& a, const char* optimizer, void* workspace, cudaStream_t stream);
cudaError_t accumulate_rows(const AccumulateRows& a, void* workspace, cudaStream_t stream);

}  // namespace cuda
}  // namespace rec_sdk
