#include <torch/csrc/stable/library.h>

#include "torch_npu_ext/ops/arguments.h"
#include "torch_npu_ext/ops/cpu.h"

namespace rec_sdk {

LookupPooled lookup_pooled_arguments(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                                     const OptionalTensor& per_sample_weights, const Tensor& columns,
                                     const Tensor& mean, int64_t first_bag, const Tensor& out) {
  const Checker check("lookup_pooled", weights);
  LookupPooled arguments{};
  arguments.weights = check.weights(weights);
  arguments.slots = check.vector<const int32_t>("slots", slots, ScalarType::Int);
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

namespace {

void lookup_pooled_cpu(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                       const OptionalTensor& per_sample_weights, const Tensor& columns, const Tensor& mean,
                       int64_t first_bag, const Tensor& out) {
  const Checker check("lookup_pooled", weights);
  const LookupPooled arguments =
      lookup_pooled_arguments(weights, slots, offsets, per_sample_weights, columns, mean, first_bag, out);
  const int64_t dim = arguments.weights.dim, lookups = arguments.lookups, bags = arguments.bags.count;
  check_bags(check, arguments.bags, columns.size(0), lookups, dim, out.size(1));
  check_indices(check, "slots", arguments.slots, lookups, arguments.weights.rows);
  const CpuKernels& kernels = cpu_kernels();
  const int64_t rows_of_bag = 1 + lookups / std::max<int64_t>(bags, 1);
  parallel_pieces(bags, piece_of(rows_of_bag < kMaxDim ? rows_of_bag * dim * 4 : INT64_MAX),
                  [&](int64_t begin, int64_t end) { kernels.lookup_pooled(arguments, begin, end); });
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CPU, m) {
  m.impl("lookup_pooled", TORCH_BOX(&rec_sdk::lookup_pooled_cpu));
}
