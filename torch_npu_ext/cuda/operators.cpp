// The operators on CUDA: arguments as on every backend, and a launch on torch's current stream. Contents of
// index tensors are not checked: reading them back would wait for the device.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <string>

#include "op_kernels/common/cuda/kernels.h"
#include "torch_npu_ext/ops/arguments.h"

namespace rec_sdk {
namespace {

using torch::headeronly::ScalarType;

// Calls launch(stream) with the current stream of the reference's device, where it is the current device too.
template <class Launch>
void on_current_stream(const char* op, const Tensor& reference, const Launch& launch) {
  const int32_t device = reference.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const cudaError_t error = launch(static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or torch would report it once more, of its own next kernel
  throw std::runtime_error(std::string("rec_sdk::") + op + ": CUDA kernel: " + cudaGetErrorString(error));
}

Tensor lookup_sequence_cuda(const Tensor& weights, const Tensor& slots) {
  Tensor out = lookup_sequence_output(weights, slots);
  const LookupSequence arguments = lookup_sequence_arguments(weights, slots, out);
  if (arguments.count == 0) return out;
  on_current_stream("lookup_sequence", weights,
                    [&](cudaStream_t stream) { return cuda::lookup_sequence(arguments, stream); });
  return out;
}

void lookup_pooled_cuda(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                        const OptionalTensor& per_sample_weights, const Tensor& columns, const Tensor& mean,
                        int64_t first_bag, const Tensor& out) {
  const LookupPooled arguments =
      lookup_pooled_arguments(weights, slots, offsets, per_sample_weights, columns, mean, first_bag, out);
  if (arguments.bags.count == 0) return;
  on_current_stream("lookup_pooled", weights,
                    [&](cudaStream_t stream) { return cuda::lookup_pooled(arguments, stream); });
}

Tensor pooled_weights_grad_cuda(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                                const Tensor& grad, const Tensor& columns, const Tensor& mean) {
  Tensor out = pooled_weights_grad_output(weights, slots);
  const PooledWeightsGrad arguments =
      pooled_weights_grad_arguments(weights, slots, offsets, grad, columns, mean, out);
  if (arguments.lookups == 0) return out;
  on_current_stream("pooled_weights_grad", weights,
                    [&](cudaStream_t stream) { return cuda::pooled_weights_grad(arguments, stream); });
  return out;
}

// Where a kernel finds rows that are in pinned host memory; null for all others.
void* pinned_rows(const Tensor& cache, const Tensor& rows) {
  if (rows.is_cuda() || !cache.is_cuda()) return nullptr;
  const torch::stable::accelerator::DeviceGuard guard(cache.get_device_index());
  cudaPointerAttributes found{};
  const cudaError_t error = cudaPointerGetAttributes(&found, rows.data_ptr());
  if (error != cudaSuccess) cudaGetLastError();  // not for torch to report
  return error == cudaSuccess && found.type == cudaMemoryTypeHost ? found.devicePointer : nullptr;
}

void copy_rows(const char* op, cudaError_t (*kernel)(const CopyRows&, cudaStream_t), const Tensor& cache,
               const Tensor& slots, const char* name, const Tensor& rows) {
  const CopyRows arguments = copy_rows_arguments(op, cache, slots, name, rows, pinned_rows(cache, rows));
  if (arguments.count == 0) return;
  on_current_stream(op, cache, [&](cudaStream_t stream) { return kernel(arguments, stream); });
}

void gather_rows_out_cuda(const Tensor& cache, const Tensor& slots, const Tensor& out) {
  copy_rows("gather_rows", cuda::gather_rows, cache, slots, "out", out);
}

Tensor gather_rows_cuda(const Tensor& cache, const Tensor& slots) {
  Tensor rows = gather_rows_output(cache, slots);
  gather_rows_out_cuda(cache, slots, rows);
  return rows;
}

void scatter_rows_cuda(const Tensor& cache, const Tensor& slots, const Tensor& rows) {
  copy_rows("scatter_rows", cuda::scatter_rows, cache, slots, "rows", rows);
}

// Freed when the operator returns; the allocator hands it out again only behind the launch on the same
// stream.
Tensor workspace_of(const Tensor& reference, const Segments& segments) {
  const int64_t bytes = cuda::segments_workspace(segments.lookups.count, segments.dim);
  return torch::stable::new_empty(reference, {bytes}, ScalarType::Byte);
}

void update_rows_cuda(const Tensor& cache, const Tensor& grad, const Tensor& unique_slots,
                      const Tensor& table_offsets, const Tensor& segment_offsets, const Tensor& grad_row,
                      const OptionalTensor& grad_column, const OptionalTensor& scale,
                      const Tensor& coefficients, OwnedString optimizer, int64_t dim,
                      ScalarType weight_dtype) {
  const UpdateRows arguments =
      update_rows_arguments(cache, grad, unique_slots, table_offsets, segment_offsets, grad_row, grad_column,
                            scale, coefficients, optimizer.value, dim, weight_dtype);
  if (arguments.segments.rows == 0) return;
  const Tensor workspace = workspace_of(cache, arguments.segments);
  on_current_stream("update_rows", cache, [&](cudaStream_t stream) {
    return cuda::update_rows(arguments, optimizer.value.c_str(), workspace.data_ptr(), stream);
  });
}

void accumulate_rows_cuda(const Tensor& pending, const Tensor& grad, const Tensor& unique_slots,
                          const Tensor& segment_offsets, const Tensor& grad_row,
                          const OptionalTensor& grad_column, const OptionalTensor& scale) {
  const AccumulateRows arguments =
      accumulate_rows_arguments(pending, grad, unique_slots, segment_offsets, grad_row, grad_column, scale);
  if (arguments.segments.rows == 0) return;
  const Tensor workspace = workspace_of(pending, arguments.segments);
  on_current_stream("accumulate_rows", pending, [&](cudaStream_t stream) {
    return cuda::accumulate_rows(arguments, workspace.data_ptr(), stream);
  });
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CUDA, m) {
  m.impl("lookup_sequence", TORCH_BOX(&rec_sdk::lookup_sequence_cuda));
  m.impl("lookup_pooled", TORCH_BOX(&rec_sdk::lookup_pooled_cuda));
  m.impl("pooled_weights_grad", TORCH_BOX(&rec_sdk::pooled_weights_grad_cuda));
  m.impl("gather_rows", TORCH_BOX(&rec_sdk::gather_rows_cuda));
  m.impl("gather_rows.out", TORCH_BOX(&rec_sdk::gather_rows_out_cuda));
  m.impl("scatter_rows", TORCH_BOX(&rec_sdk::scatter_rows_cuda));
  m.impl("update_rows", TORCH_BOX(&rec_sdk::update_rows_cuda));
  m.impl("accumulate_rows", TORCH_BOX(&rec_sdk::accumulate_rows_cuda));
}
