#include <torch/csrc/stable/library.h>

#include "torch_npu_ext/ops/arguments.h"
#include "torch_npu_ext/ops/cpu.h"

namespace rec_sdk {

Tensor pooled_weights_grad_output(const Tensor& weights, const Tensor& slots) {
  const Checker check("pooled_weights_grad", weights);
  check.tensor("slots", slots, ScalarType::Int, 1);
  return torch::stable::new_empty(weights, {slots.size(0)}, ScalarType::Float);
}

PooledWeightsGrad pooled_weights_grad_arguments(const Tensor& weights, const Tensor& slots,
                                                const Tensor& offsets, const Tensor& grad,
                                                const Tensor& columns, const Tensor& mean,
                                                const Tensor& out) {
  const Checker check("pooled_weights_grad", weights);
  PooledWeightsGrad arguments{};
  arguments.weights = check.weights(weights);
  arguments.slots = check.vector<const int32_t>("slots", slots, ScalarType::Int);
  arguments.grad = check.matrix("grad", grad);
  arguments.grad_stride = row_stride(grad);
  arguments.grad_columns = grad.size(1);
  arguments.lookups = slots.numel();
  arguments.bags = check.bags(offsets, columns, mean, 0, grad.size(0));
  arguments.out = static_cast<float*>(out.data_ptr());
  return arguments;
}

namespace {

Tensor pooled_weights_grad_cpu(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                               const Tensor& grad, const Tensor& columns, const Tensor& mean) {
  const Checker check("pooled_weights_grad", weights);
  Tensor out = pooled_weights_grad_output(weights, slots);
  const PooledWeightsGrad arguments =
      pooled_weights_grad_arguments(weights, slots, offsets, grad, columns, mean, out);
  const int64_t dim = arguments.weights.dim, lookups = arguments.lookups;
  check_bags(check, arguments.bags, columns.size(0), lookups, dim, grad.size(1));
  check_indices(check, "slots", arguments.slots, lookups, arguments.weights.rows);
  const CpuKernels& kernels = cpu_kernels();
  parallel_pieces(lookups, piece_of(dim * 4),
                  [&](int64_t begin, int64_t end) { kernels.pooled_weights_grad(arguments, begin, end); });
  return out;
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CPU, m) {
  m.impl("pooled_weights_grad", TORCH_BOX(&rec_sdk::pooled_weights_grad_cpu));
}
