#include <torch/csrc/stable/library.h>

#include <cstring>

#include "op_kernels/common/optimizers.h"
#include "torch_npu_ext/ops/arguments.h"
#include "torch_npu_ext/ops/cpu.h"
#include "torch_npu_ext/ops/segment_arguments.h"

namespace rec_sdk {

namespace {

using REC_SDK_ISA::OptimizerList;

template <class Optimizer>
RecordLayout layout_of(const Checker& check, int64_t dim, DType dtype, const DTypes& state_dtypes) {
  constexpr int64_t kStates = Optimizer::kElementStates + Optimizer::kRowStates;
  static_assert(kStates <= kMaxStates, "a record holds at most kMaxStates states");
  int64_t elements[kMaxStates] = {};
  for (int64_t s = 0; s < kStates; ++s) elements[s] = s < Optimizer::kElementStates ? dim : 1;
  check.require(state_dtypes.empty() || static_cast<int64_t>(state_dtypes.size()) == kStates,
                "state_dtypes must be empty or have ", kStates, " element(s), one for each state of ",
                Optimizer::name(), ", got ", state_dtypes.size());
  DType types[kMaxStates] = {};
  for (size_t s = 0; s < state_dtypes.size(); ++s) {
    check.require(state_dtypes[s] >= 0 && state_dtypes[s] <= 2,
                  "state_dtypes must be of 0 (Float), 1 (Half) or 2 (BFloat16), got ", state_dtypes[s],
                  " at index ", s);
    types[s] = static_cast<DType>(state_dtypes[s]);
  }
  return make_record_layout(dim, dtype, elements, kStates, types);
}

template <class... Optimizer>
RecordLayout find_layout(const Checker& check, const std::string& name, int64_t dim, DType dtype,
                         const DTypes& state_dtypes, OptimizerList<Optimizer...>) {
  RecordLayout layout{};
  const bool found = ((name == Optimizer::name() &&
                       (layout = layout_of<Optimizer>(check, dim, dtype, state_dtypes), true)) ||
                      ...);
  if (!found) {
    std::string names;
    ((names += std::string(names.empty() ? "" : ", ") + Optimizer::name()), ...);
    check.require(false, "optimizer must be one of ", names, "; got '", name, "'");
  }
  return layout;
}

template <class... Optimizer>
const char* find_coefficients(const char* name, OptimizerList<Optimizer...>) {
  const char* found = nullptr;
  ((std::strcmp(name, Optimizer::name()) == 0 ? void(found = Optimizer::coefficients()) : void()), ...);
  return found;
}

}  // namespace

UpdateRows update_rows_arguments(const Tensor& cache, const Gradients& grads, const Tensor& unique_slots,
                                 const Tensor& table_offsets, const Tensor& segment_offsets,
                                 const Tensor& grad_row, const OptionalTensor& grad_source,
                                 const OptionalTensor& grad_column, const OptionalTensor& scale,
                                 const Tensor& coefficients, const std::string& optimizer, int64_t dim,
                                 ScalarType weight_dtype, const OptionalTensor& row_ids,
                                 const OptionalTensor& rounding_seeds, const DTypes& state_dtypes,
                                 const OptionalTensor& hot_segments, const OptionalTensor& row_norms) {
  const Checker check("update_rows", cache);
  check.require(dim >= 1 && dim <= kMaxDim, "dim must be in [1, ", kMaxDim, "], got ", dim);
  UpdateRows arguments{};
  arguments.layout = find_layout(check, optimizer, dim, storage_dtype(check, "weight_dtype", weight_dtype),
                                 state_dtypes, REC_SDK_ISA::Optimizers{});
  check.tensor("cache", cache, ScalarType::Byte, 2);
  check.contiguous("cache", cache);
  check.require(cache.size(1) == arguments.layout.bytes, "cache must have ", arguments.layout.bytes,
                " bytes per row for ", optimizer, " with dim ", dim, ", got ", cache.size(1));
  arguments.cache = static_cast<uint8_t*>(cache.data_ptr());
  arguments.slots = cache.size(0);
  check.require(reinterpret_cast<uintptr_t>(arguments.cache) % kStateAlignment == 0,
                "cache must be aligned to ", kStateAlignment, " bytes");
  arguments.segments = segments_of(check, grads, unique_slots, segment_offsets, grad_row, grad_source,
                                   grad_column, scale, hot_segments, dim);
  arguments.table_offsets = check.vector<const int32_t>("table_offsets", table_offsets, ScalarType::Int);
  arguments.tables = table_offsets.size(0) - 1;
  check.require(arguments.tables >= 0, "table_offsets must have tables + 1 elements, got none");
  check.tensor("coefficients", coefficients, ScalarType::Float, 2);
  check.contiguous("coefficients", coefficients);
  check.require(coefficients.size(0) == arguments.tables && coefficients.size(1) == kCoefficients,
                "coefficients must be [", arguments.tables, ", ", kCoefficients, "], got [",
                coefficients.size(0), ", ", coefficients.size(1), "]");
  arguments.coefficients = static_cast<const float*>(coefficients.data_ptr());
  check.require(row_ids.has_value() == rounding_seeds.has_value(),
                "row_ids and rounding_seeds belong together: give both, or neither to round to nearest");
  if (row_ids.has_value()) {
    arguments.row_ids =
        check.vector<const int64_t>("row_ids", *row_ids, ScalarType::Long, arguments.segments.rows);
    arguments.rounding_seeds =
        check.vector<const int64_t>("rounding_seeds", *rounding_seeds, ScalarType::Long, arguments.tables);
  }
  if (row_norms.has_value()) {
    check.tensor("row_norms", *row_norms, ScalarType::Float, 2);
    check.contiguous("row_norms", *row_norms);
    check.require(row_norms->size(0) == 2 && row_norms->size(1) == arguments.segments.rows,
                  "row_norms must be [2, ", arguments.segments.rows, "], got [", row_norms->size(0), ", ",
                  row_norms->size(1), "]");
    arguments.row_norms = static_cast<float*>(row_norms->data_ptr());
  }
  return arguments;
}

namespace {

void update_rows_cpu(const Tensor& cache, const Tensors& grads, const Tensor& unique_slots,
                     const Tensor& table_offsets, const Tensor& segment_offsets, const Tensor& grad_row,
                     const OptionalTensor& grad_source, const OptionalTensor& grad_column,
                     const OptionalTensor& scale, const Tensor& coefficients, OwnedString optimizer,
                     int64_t dim, ScalarType weight_dtype, const OptionalTensor& row_ids,
                     const OptionalTensor& rounding_seeds, DTypes state_dtypes,
                     const OptionalTensor& hot_segments, const OptionalTensor& row_norms) {
  const Checker check("update_rows", cache);
  const Gradients gradients = gradients_of("update_rows", cache, grads);
  UpdateRows arguments =
      update_rows_arguments(cache, gradients, unique_slots, table_offsets, segment_offsets, grad_row,
                            grad_source, grad_column, scale, coefficients, optimizer.value, dim, weight_dtype,
                            row_ids, rounding_seeds, state_dtypes, hot_segments, row_norms);
  check_offsets(check, "table_offsets", arguments.table_offsets, arguments.tables, arguments.segments.rows);
  check_segments(check, arguments.segments, cache.size(0), hot_segments.has_value());
  const HotRows hot_rows(arguments.segments);
  const auto kernel = cpu_kernels().update_rows(optimizer.value.c_str());
  parallel_rows(arguments.segments, arguments.layout.bytes,
                [&](int64_t begin, int64_t end, float* scratch) { kernel(arguments, begin, end, scratch); });
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CPU, m) { m.impl("update_rows", TORCH_BOX(&rec_sdk::update_rows_cpu)); }

// Returns the names of an optimizer's coefficients except the first one, separated by spaces; null if there
// is no such optimizer. Python needs the names to fill in the coefficients.
extern "C" __attribute__((visibility("default"))) const char* rec_sdk_coefficient_names(
    const char* optimizer) {
  return rec_sdk::find_coefficients(optimizer, rec_sdk::REC_SDK_ISA::Optimizers{});
}
