#include <torch/csrc/stable/library.h>

#include "torch_npu_ext/ops/arguments.h"
#include "torch_npu_ext/ops/cpu.h"
#include "torch_npu_ext/ops/output_memory.h"

namespace rec_sdk {

Tensor lookup_sequence_output(const Tensor& weights, const Tensor& slots) {
  const Checker check("lookup_sequence", weights);
  check.tensor("weights", weights, weights.scalar_type(), 2);
  check.tensor("slots", slots, ScalarType::Int, 1);
  return empty_output(weights, slots.size(0), weights.size(1));
}

LookupSequence lookup_sequence_arguments(const Tensor& weights, const Tensor& slots, const Tensor& out) {
  const Checker check("lookup_sequence", weights);
  return {check.weights(weights), check.vector<const int32_t>("slots", slots, ScalarType::Int),
          static_cast<float*>(out.data_ptr()), slots.numel()};
}

void lookup_sequence_on_cpu(const LookupSequence& a) {
  const CpuKernels& kernels = cpu_kernels();
  parallel_pieces(a.count, piece_of(a.weights.dim * 4),
                  [&](int64_t begin, int64_t end) { kernels.lookup_sequence(a, begin, end); });
}

namespace {

Tensor lookup_sequence_cpu(const Tensor& weights, const Tensor& slots) {
  const Checker check("lookup_sequence", weights);
  Tensor out = lookup_sequence_output(weights, slots);
  const LookupSequence arguments = lookup_sequence_arguments(weights, slots, out);
  check_indices(check, "slots", arguments.slots, arguments.count, arguments.weights.rows);
  lookup_sequence_on_cpu(arguments);
  return out;
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CPU, m) {
  m.impl("lookup_sequence", TORCH_BOX(&rec_sdk::lookup_sequence_cpu));
}
