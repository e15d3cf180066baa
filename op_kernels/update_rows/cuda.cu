#include <cuda_runtime.h>

#include <cstring>

#include "op_kernels/common/cuda/kernels.h"
#include "op_kernels/common/cuda/update_records.h"

namespace rec_sdk {
namespace cuda {
namespace {

template <class Optimizer>
cudaError_t update_any_format(const UpdateRows& a, void* workspace, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  REC_SDK_ISA::with_format(a.layout.weight_dtype, [&](auto format) {
    error = update_with<Optimizer, decltype(format)>(a, workspace, stream);
  });
  return error;
}

using Update = cudaError_t (*)(const UpdateRows&, void*, cudaStream_t);

template <class... Optimizer>
Update find(const char* name, REC_SDK_ISA::OptimizerList<Optimizer...>) {
  Update found = nullptr;
  ((strcmp(name, Optimizer::name()) == 0 ? void(found = update_any_format<Optimizer>) : void()), ...);
  return found;
}

}  // namespace

int64_t segments_workspace(const Segments& segments) {
  return gradient_table_bytes(segments.lookups) + chunk_places(segments) * segments.dim * 4;
}

cudaError_t update_rows(const UpdateRows& a, const char* optimizer, void* workspace, cudaStream_t stream) {
  const Update update = find(optimizer, REC_SDK_ISA::Optimizers{});
  return update != nullptr ? update(a, workspace, stream) : cudaErrorInvalidValue;
}

}  // namespace cuda
}  // namespace rec_sdk
