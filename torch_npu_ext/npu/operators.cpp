// The operators on an NPU: arguments as on every backend, and a launch on torch_npu's current stream.
// Contents of index tensors are not checked: reading them back would wait for the device.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "op_kernels/common/ascendc/launch.h"
#include "torch_npu_ext/npu/launch.h"
#include "torch_npu_ext/ops/arguments.h"

namespace rec_sdk {
namespace {

using torch::headeronly::ScalarType;

// Launches when there is work. `launch` and its arguments are copied into the task queue.
template <class Arguments>
void launch(const char* op, const Tensor& reference, int64_t work, void (*kernel)(void*, const Arguments*),
            const Arguments& arguments) {
  if (work == 0) return;
  on_current_stream(op, reference.get_device_index(),
                    [kernel, arguments](void* stream) { kernel(stream, &arguments); });
}

Tensor lookup_sequence_npu(const Tensor& weights, const Tensor& slots) {
  Tensor out = lookup_sequence_output(weights, slots);
  const LookupSequence arguments = lookup_sequence_arguments(weights, slots, out);
  launch("rec_sdk_lookup_sequence", weights, arguments.count, rec_sdk_launch_lookup_sequence, arguments);
  return out;
}

void lookup_pooled_npu(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                       const OptionalTensor& per_sample_weights, const Tensor& columns, const Tensor& mean,
                       int64_t first_bag, const Tensor& out) {
  const LookupPooled arguments =
      lookup_pooled_arguments(weights, slots, offsets, per_sample_weights, columns, mean, first_bag, out);
  launch("rec_sdk_lookup_pooled", weights, arguments.bags.count, rec_sdk_launch_lookup_pooled, arguments);
}

Tensor pooled_weights_grad_npu(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                               const Tensor& grad, const Tensor& columns, const Tensor& mean) {
  Tensor out = pooled_weights_grad_output(weights, slots);
  const PooledWeightsGrad arguments =
      pooled_weights_grad_arguments(weights, slots, offsets, grad, columns, mean, out);
  launch("rec_sdk_pooled_weights_grad", weights, arguments.lookups, rec_sdk_launch_pooled_weights_grad,
         arguments);
  return out;
}

void gather_rows_out_npu(const Tensor& cache, const Tensor& slots, const Tensor& out) {
  const CopyRows arguments = copy_rows_arguments("gather_rows", cache, slots, "out", out);
  launch("rec_sdk_gather_rows", cache, arguments.count, rec_sdk_launch_gather_rows, arguments);
}

Tensor gather_rows_npu(const Tensor& cache, const Tensor& slots) {
  Tensor rows = gather_rows_output(cache, slots);
  gather_rows_out_npu(cache, slots, rows);
  return rows;
}

void scatter_rows_npu(const Tensor& cache, const Tensor& slots, const Tensor& rows) {
  const CopyRows arguments = copy_rows_arguments("scatter_rows", cache, slots, "rows", rows);
  launch("rec_sdk_scatter_rows", cache, arguments.count, rec_sdk_launch_scatter_rows, arguments);
}

// Freed when the operator returns; the allocator hands it out again only behind the launch on the same
// stream.
Tensor workspace_of(const Tensor& reference, const Segments& segments) {
  const int64_t bytes = rec_sdk_segments_workspace(segments.lookups.count, segments.dim);
  return torch::stable::new_empty(reference, {bytes}, ScalarType::Byte);
}

void update_rows_npu(const Tensor& cache, const Tensor& grad, const Tensor& unique_slots,
                     const Tensor& table_offsets, const Tensor& segment_offsets, const Tensor& grad_row,
                     const OptionalTensor& grad_column, const OptionalTensor& scale,
                     const Tensor& coefficients, OwnedString optimizer, int64_t dim,
                     ScalarType weight_dtype) {
  const UpdateRows arguments =
      update_rows_arguments(cache, grad, unique_slots, table_offsets, segment_offsets, grad_row, grad_column,
                            scale, coefficients, optimizer.value, dim, weight_dtype);
  if (arguments.segments.rows == 0) return;
  const Tensor workspace = workspace_of(cache, arguments.segments);
  on_current_stream("rec_sdk_update_rows", cache.get_device_index(),
                    [arguments, name = std::move(optimizer.value), at = workspace.data_ptr()](void* stream) {
                      rec_sdk_launch_update_rows(stream, &arguments, name.c_str(), at);
                    });
}

void accumulate_rows_npu(const Tensor& pending, const Tensor& grad, const Tensor& unique_slots,
                         const Tensor& segment_offsets, const Tensor& grad_row,
                         const OptionalTensor& grad_column, const OptionalTensor& scale) {
  const AccumulateRows arguments =
      accumulate_rows_arguments(pending, grad, unique_slots, segment_offsets, grad_row, grad_column, scale);
  if (arguments.segments.rows == 0) return;
  const Tensor workspace = workspace_of(pending, arguments.segments);
  on_current_stream("rec_sdk_accumulate_rows", pending.get_device_index(),
                    [arguments, at = workspace.data_ptr()](void* stream) {
                      rec_sdk_launch_accumulate_rows(stream, &arguments, at);
                    });
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, PrivateUse1, m) {
  m.impl("lookup_sequence", TORCH_BOX(&rec_sdk::lookup_sequence_npu));
  m.impl("lookup_pooled", TORCH_BOX(&rec_sdk::lookup_pooled_npu));
  m.impl("pooled_weights_grad", TORCH_BOX(&rec_sdk::pooled_weights_grad_npu));
  m.impl("gather_rows", TORCH_BOX(&rec_sdk::gather_rows_npu));
  m.impl("gather_rows.out", TORCH_BOX(&rec_sdk::gather_rows_out_npu));
  m.impl("scatter_rows", TORCH_BOX(&rec_sdk::scatter_rows_npu));
  m.impl("update_rows", TORCH_BOX(&rec_sdk::update_rows_npu));
  m.impl("accumulate_rows", TORCH_BOX(&rec_sdk::accumulate_rows_npu));
}
