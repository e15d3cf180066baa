// Functions that convert the tensors of an operator to the arguments of its kernel. They check what every
// backend requires: dtypes, shapes, strides and devices. A backend calls the function of an operator, checks
// the contents of tensors if it can, and launches the kernel. The functions are exported, because backends
// are separate libraries.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "op_kernels/common/arguments.h"

#pragma GCC visibility push(default)
namespace rec_sdk {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using DTypes = std::vector<int64_t>;
using Gradients = std::vector<Gradient>;

// Functions that allocate the uninitialized result of an operator.
Tensor lookup_sequence_output(const Tensor& weights, const Tensor& slots);      // (n, dim) fp32
Tensor pooled_weights_grad_output(const Tensor& weights, const Tensor& slots);  // (n) fp32
Tensor gather_rows_output(const Tensor& cache, const Tensor& slots);            // (n, bytes) uint8

// weights [slots, dim] fp32 | fp16 | bf16, stride(1) = 1; slots [n] int32; out (n, dim) fp32 contiguous.
LookupSequence lookup_sequence_arguments(const Tensor& weights, const Tensor& slots, const Tensor& out);

LookupPooled lookup_pooled_arguments(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                                     const OptionalTensor& per_sample_weights, const Tensor& columns,
                                     const Tensor& mean, int64_t first_bag, const Tensor& out);

PooledWeightsGrad pooled_weights_grad_arguments(const Tensor& weights, const Tensor& slots,
                                                const Tensor& offsets, const Tensor& grad,
                                                const Tensor& columns, const Tensor& mean, const Tensor& out);

// grads: at least one tensor, each [rows, columns] fp32, stride(1) = 1. `cache` determines the device.
Gradients gradients_of(const char* op, const Tensor& cache, const Tensors& grads);

// Does not set `hot_rows`, which only the CPU kernels use. `grads` is the result of gradients_of and
// must outlive this function's result.
UpdateRows update_rows_arguments(const Tensor& cache, const Gradients& grads, const Tensor& unique_slots,
                                 const Tensor& table_offsets, const Tensor& segment_offsets,
                                 const Tensor& grad_row, const OptionalTensor& grad_source,
                                 const OptionalTensor& grad_column, const OptionalTensor& scale,
                                 const Tensor& coefficients, const std::string& optimizer, int64_t dim,
                                 torch::headeronly::ScalarType weight_dtype, const OptionalTensor& row_ids,
                                 const OptionalTensor& rounding_seeds, const DTypes& state_dtypes,
                                 const OptionalTensor& hot_segments, const OptionalTensor& row_norms);

AccumulateRows accumulate_rows_arguments(const Tensor& pending, const Gradients& grads,
                                         const Tensor& unique_slots, const Tensor& segment_offsets,
                                         const Tensor& grad_row, const OptionalTensor& grad_source,
                                         const OptionalTensor& grad_column, const OptionalTensor& scale,
                                         const OptionalTensor& hot_segments);

// `rows` is the result of a gather or the source of a scatter. `op` and `name` are the names of the operator
// and of this argument in errors. host_rows: the address at which the device accesses `rows` in host memory;
// null if the device cannot access them, or if they are in device memory.
CopyRows copy_rows_arguments(const char* op, const Tensor& cache, const Tensor& slots, const char* name,
                             const Tensor& rows, void* host_rows = nullptr);

// Like copy_rows_arguments, for the rows that are copied into the cache (`rows`) and the victims (`victims`).
SwapRows swap_rows_arguments(const Tensor& cache, const Tensor& slots, const Tensor& victim_indices,
                             const Tensor& rows, const Tensor& victims, void* host_rows = nullptr,
                             void* host_victims = nullptr);

// The arguments that swap_lookup_sequence and swap_lookup_pooled have in common.
struct SwapAndLookups {
  const char* op;
  const Tensor& cache;
  const Tensor& slots;
  const OptionalTensor& victim_indices;
  const Tensor& rows;
  const OptionalTensor& victims;
  int64_t dim;
  torch::headeronly::ScalarType weight_dtype;
  const Tensor& lookup_slots;
  const Tensor& origins;
};

// Allocates the result, (n, dim) fp32, uninitialized.
Tensor swap_lookup_sequence_output(const SwapAndLookups& all);
// Both `victim_indices` and `victims` are set, or neither if there are no victims.
SwapLookupSequence swap_lookup_sequence_arguments(const SwapAndLookups& all, const Tensor& out);
SwapLookupPooled swap_lookup_pooled_arguments(const SwapAndLookups& all, const Tensor& offsets,
                                              const OptionalTensor& per_sample_weights, const Tensor& columns,
                                              const Tensor& mean, int64_t first_bag, const Tensor& out);

}  // namespace rec_sdk
#pragma GCC visibility pop

namespace rec_sdk {

class Checker;

// The arguments of swap_rows and of lookup_pooled, for these operators and for operators that contain them.
SwapRows swap_arguments(const Checker& check, const Tensor& cache, const Tensor& slots,
                        const Tensor& victim_indices, const Tensor& rows, const Tensor& victims,
                        void* host_rows, void* host_victims);
LookupPooled pooled_arguments(const Checker& check, const Weights& weights, const char* slots_name,
                              const Tensor& slots, const Tensor& offsets,
                              const OptionalTensor& per_sample_weights, const Tensor& columns,
                              const Tensor& mean, int64_t first_bag, const Tensor& out);

// A string argument of an operator, used because TORCH_BOX leaks one string per call if it converts to
// std::string.
struct OwnedString {
  std::string value;
};

}  // namespace rec_sdk

template <>
struct torch::stable::detail::ToImpl<rec_sdk::OwnedString> {
  static rec_sdk::OwnedString call(StableIValue value, uint64_t, bool) {
    const StringHandle handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    rec_sdk::OwnedString result{std::string(data, length)};
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return result;
  }
};
