#include <torch/csrc/stable/library.h>

#include "torch_npu_ext/ops/arguments.h"
#include "torch_npu_ext/ops/cpu.h"
#include "torch_npu_ext/ops/segment_arguments.h"

namespace rec_sdk {

AccumulateRows accumulate_rows_arguments(const Tensor& pending, const Gradients& grads,
                                         const Tensor& unique_slots, const Tensor& segment_offsets,
                                         const Tensor& grad_row, const OptionalTensor& grad_source,
                                         const OptionalTensor& grad_column, const OptionalTensor& scale,
                                         const OptionalTensor& hot_segments) {
  const Checker check("accumulate_rows", pending);
  check.tensor("pending", pending, ScalarType::Float, 2);
  check.contiguous("pending", pending);
  check.require(pending.size(1) >= 2 && pending.size(1) % 2 == 0,
                "pending must have 2 * dim columns (sum, compensation), got ", pending.size(1));
  check.require(pending.size(1) <= 2 * kMaxDim, "pending must have at most ", 2 * kMaxDim, " columns, got ",
                pending.size(1));
  AccumulateRows arguments{};
  arguments.segments = segments_of(check, grads, unique_slots, segment_offsets, grad_row, grad_source,
                                   grad_column, scale, hot_segments, pending.size(1) / 2);
  arguments.pending = static_cast<float*>(pending.data_ptr());
  arguments.slots = pending.size(0);
  return arguments;
}

namespace {

void accumulate_rows_cpu(const Tensor& pending, const Tensors& grads, const Tensor& unique_slots,
                         const Tensor& segment_offsets, const Tensor& grad_row,
                         const OptionalTensor& grad_source, const OptionalTensor& grad_column,
                         const OptionalTensor& scale, const OptionalTensor& hot_segments) {
  const Checker check("accumulate_rows", pending);
  const Gradients gradients = gradients_of("accumulate_rows", pending, grads);
  AccumulateRows arguments =
      accumulate_rows_arguments(pending, gradients, unique_slots, segment_offsets, grad_row, grad_source,
                                grad_column, scale, hot_segments);
  check_segments(check, arguments.segments, pending.size(0), hot_segments.has_value());
  const HotRows hot_rows(arguments.segments);
  const CpuKernels& kernels = cpu_kernels();
  parallel_rows(arguments.segments, arguments.segments.dim * 8,
                [&](int64_t begin, int64_t end, float* scratch) {
                  kernels.accumulate_rows(arguments, begin, end, scratch);
                });
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CPU, m) {
  m.impl("accumulate_rows", TORCH_BOX(&rec_sdk::accumulate_rows_cpu));
}
