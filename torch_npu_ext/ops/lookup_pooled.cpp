#include <torch/csrc/stable/library.h>

#include "torch_npu_ext/ops/arguments.h"
#include "torch_npu_ext/ops/cpu.h"

namespace rec_sdk {

LookupPooled pooled_arguments(const Checker& check, const Weights& weights, const char* slots_name,
                              const Tensor& slots, const Tensor& offsets,
                              const OptionalTensor& per_sample_weights, const Tensor& columns,
                              const Tensor& mean, int64_t first_bag, const Tensor& out) {
  LookupPooled arguments{};
  arguments.weights = weights;
  arguments.slots = check.vector<const int32_t>(slots_name, slots, ScalarType::Int);
  if (per_sample_weights.has_value()) {
    arguments.per_sample_weights = check.vector<const float>("per_sample_weights", *per_sample_weights,
                                                             ScalarType::Float, slots.size(0));
  }
  arguments.out = check.matrix("out", out);
  arguments.out_stride = row_stride(out);
  arguments.out_columns = out.size(1);
  arguments.lookups = slots.numel();
  arguments.bags = check.bags(offsets, columns, mean, first_bag, out.size(0));
  return arguments;
}

LookupPooled lookup_pooled_arguments(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                                     const OptionalTensor& per_sample_weights, const Tensor& columns,
                                     const Tensor& mean, int64_t first_bag, const Tensor& out) {
  const Checker check("lookup_pooled", weights);
  return pooled_arguments(check, check.weights(weights), "slots", slots, offsets, per_sample_weights, columns,
                          mean, first_bag, out);
}

void lookup_pooled_on_cpu(const LookupPooled& a) {
  const CpuKernels& kernels = cpu_kernels();
  const int64_t bags = a.bags.count, rows_of_bag = 1 + a.lookups / std::max<int64_t>(bags, 1);
  parallel_pieces(bags, piece_of(rows_of_bag < kMaxDim ? rows_of_bag * a.weights.dim * 4 : INT64_MAX),
                  [&](int64_t begin, int64_t end) { kernels.lookup_pooled(a, begin, end); });
}

namespace {

void lookup_pooled_cpu(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                       const OptionalTensor& per_sample_weights, const Tensor& columns, const Tensor& mean,
                       int64_t first_bag, const Tensor& out) {
  const Checker check("lookup_pooled", weights);
  const LookupPooled arguments =
      lookup_pooled_arguments(weights, slots, offsets, per_sample_weights, columns, mean, first_bag, out);
  check_bags(check, arguments.bags, columns.size(0), arguments.lookups, arguments.weights.dim, out.size(1));
  check_indices(check, "slots", arguments.slots, arguments.lookups, arguments.weights.rows);
  lookup_pooled_on_cpu(arguments);
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CPU, m) {
  m.impl("lookup_pooled", TORCH_BOX(&rec_sdk::lookup_pooled_cpu));
}
