// The operators on a device. Each one checks its arguments with the functions of arguments.h, and launches
// the kernel if there is work. The contents of index tensors are not checked, because the host would have to
// wait for the device.
//
// A backend is a class with static functions that launch on the current stream of the device of `on`:
//   name(on, arguments)                for each of REC_SDK_OPERATORS (op_kernels/common/operators.h) and of
//                                      REC_SDK_JOINED_OPERATORS (SeparateLaunches has these)
//   update_rows(on, arguments, optimizer, workspace), accumulate_rows(on, arguments, workspace)
// The class also has two functions without a launch:
//   segments_workspace(segments)       the size of `workspace`, in bytes of device memory
//   host_rows(cache, rows)             the device's address of rows in host memory; null if it has none
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <utility>

#include "torch_npu_ext/ops/arguments.h"

namespace rec_sdk {

// Joined operators for backends without kernels for them: launches the kernels of the two operators in
// succession.
template <class Backend>
struct SeparateLaunches {
  static void swap_lookup_sequence(const Tensor& on, const SwapLookupSequence& a) {
    write_staged_rows(on, a.swap);
    if (a.lookup.count > 0) Backend::lookup_sequence(on, a.lookup);
  }
  static void swap_lookup_pooled(const Tensor& on, const SwapLookupPooled& a) {
    write_staged_rows(on, a.swap);
    if (a.lookup.bags.count > 0) Backend::lookup_pooled(on, a.lookup);
  }

 private:
  static void write_staged_rows(const Tensor& on, const SwapRows& a) {
    if (a.count == 0) return;
    if (a.victim_indices != nullptr) {
      Backend::swap_rows(on, a);
    } else {
      Backend::scatter_rows(
          on, {a.cache, const_cast<uint8_t*>(a.rows), a.slots, a.bytes, a.cache_slots, a.count});
    }
  }
};

template <class Backend>
struct DeviceOperators {
  using ScalarType = torch::headeronly::ScalarType;

  static Tensor lookup_sequence(const Tensor& weights, const Tensor& slots) {
    Tensor out = lookup_sequence_output(weights, slots);
    const LookupSequence arguments = lookup_sequence_arguments(weights, slots, out);
    if (arguments.count > 0) Backend::lookup_sequence(weights, arguments);
    return out;
  }

  static void lookup_pooled(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                            const OptionalTensor& per_sample_weights, const Tensor& columns,
                            const Tensor& mean, int64_t first_bag, const Tensor& out) {
    const LookupPooled arguments =
        lookup_pooled_arguments(weights, slots, offsets, per_sample_weights, columns, mean, first_bag, out);
    if (arguments.bags.count > 0) Backend::lookup_pooled(weights, arguments);
  }

  static Tensor pooled_weights_grad(const Tensor& weights, const Tensor& slots, const Tensor& offsets,
                                    const Tensor& grad, const Tensor& columns, const Tensor& mean) {
    Tensor out = pooled_weights_grad_output(weights, slots);
    const PooledWeightsGrad arguments =
        pooled_weights_grad_arguments(weights, slots, offsets, grad, columns, mean, out);
    if (arguments.lookups > 0) Backend::pooled_weights_grad(weights, arguments);
    return out;
  }

  static void gather_rows_out(const Tensor& cache, const Tensor& slots, const Tensor& out) {
    const CopyRows arguments =
        copy_rows_arguments("gather_rows", cache, slots, "out", out, Backend::host_rows(cache, out));
    if (arguments.count > 0) Backend::gather_rows(cache, arguments);
  }

  static Tensor gather_rows(const Tensor& cache, const Tensor& slots) {
    Tensor rows = gather_rows_output(cache, slots);
    gather_rows_out(cache, slots, rows);
    return rows;
  }

  static void scatter_rows(const Tensor& cache, const Tensor& slots, const Tensor& rows) {
    const CopyRows arguments =
        copy_rows_arguments("scatter_rows", cache, slots, "rows", rows, Backend::host_rows(cache, rows));
    if (arguments.count > 0) Backend::scatter_rows(cache, arguments);
  }

  static void swap_rows(const Tensor& cache, const Tensor& slots, const Tensor& victim_indices,
                        const Tensor& rows, const Tensor& victims) {
    const SwapRows arguments =
        swap_rows_arguments(cache, slots, victim_indices, rows, victims, Backend::host_rows(cache, rows),
                            Backend::host_rows(cache, victims));
    if (arguments.count > 0) Backend::swap_rows(cache, arguments);
  }

  static Tensor swap_lookup_sequence(const Tensor& cache, const Tensor& slots,
                                     const OptionalTensor& victim_indices, const Tensor& rows,
                                     const OptionalTensor& victims, int64_t dim, ScalarType weight_dtype,
                                     const Tensor& lookup_slots, const Tensor& origins) {
    const SwapAndLookups all{"swap_lookup_sequence", cache,        slots,  victim_indices, rows, victims, dim,
                             weight_dtype,           lookup_slots, origins};
    Tensor out = swap_lookup_sequence_output(all);
    const SwapLookupSequence arguments = swap_lookup_sequence_arguments(all, out);
    if (arguments.swap.count > 0 || arguments.lookup.count > 0) {
      Backend::swap_lookup_sequence(cache, arguments);
    }
    return out;
  }

  static void swap_lookup_pooled(const Tensor& cache, const Tensor& slots,
                                 const OptionalTensor& victim_indices, const Tensor& rows,
                                 const OptionalTensor& victims, int64_t dim, ScalarType weight_dtype,
                                 const Tensor& lookup_slots, const Tensor& origins, const Tensor& offsets,
                                 const OptionalTensor& per_sample_weights, const Tensor& columns,
                                 const Tensor& mean, int64_t first_bag, const Tensor& out) {
    const SwapAndLookups all{"swap_lookup_pooled", cache,        slots,  victim_indices, rows, victims, dim,
                             weight_dtype,         lookup_slots, origins};
    const SwapLookupPooled arguments =
        swap_lookup_pooled_arguments(all, offsets, per_sample_weights, columns, mean, first_bag, out);
    if (arguments.swap.count > 0 || arguments.lookup.bags.count > 0) {
      Backend::swap_lookup_pooled(cache, arguments);
    }
  }

  static void update_rows(const Tensor& cache, const Tensors& grads, const Tensor& unique_slots,
                          const Tensor& table_offsets, const Tensor& segment_offsets, const Tensor& grad_row,
                          const OptionalTensor& grad_source, const OptionalTensor& grad_column,
                          const OptionalTensor& scale, const Tensor& coefficients, OwnedString optimizer,
                          int64_t dim, ScalarType weight_dtype, const OptionalTensor& row_ids,
                          const OptionalTensor& rounding_seeds, DTypes state_dtypes,
                          const OptionalTensor& hot_segments, const OptionalTensor& row_norms) {
    const Gradients gradients = gradients_of("update_rows", cache, grads);
    const UpdateRows arguments =
        update_rows_arguments(cache, gradients, unique_slots, table_offsets, segment_offsets, grad_row,
                              grad_source, grad_column, scale, coefficients, optimizer.value, dim,
                              weight_dtype, row_ids, rounding_seeds, state_dtypes, hot_segments, row_norms);
    if (arguments.segments.rows == 0) return;
    const Tensor workspace = workspace_of(cache, arguments.segments);
    Backend::update_rows(cache, arguments, std::move(optimizer.value), workspace.data_ptr());
  }

  static void accumulate_rows(const Tensor& pending, const Tensors& grads, const Tensor& unique_slots,
                              const Tensor& segment_offsets, const Tensor& grad_row,
                              const OptionalTensor& grad_source, const OptionalTensor& grad_column,
                              const OptionalTensor& scale, const OptionalTensor& hot_segments) {
    const Gradients gradients = gradients_of("accumulate_rows", pending, grads);
    const AccumulateRows arguments =
        accumulate_rows_arguments(pending, gradients, unique_slots, segment_offsets, grad_row, grad_source,
                                  grad_column, scale, hot_segments);
    if (arguments.segments.rows == 0) return;
    const Tensor workspace = workspace_of(pending, arguments.segments);
    Backend::accumulate_rows(pending, arguments, workspace.data_ptr());
  }

  // Registers the operators; must be called in STABLE_TORCH_LIBRARY_IMPL with the backend's dispatch key.
  static void register_in(torch::stable::detail::StableLibrary& library) {
    library.impl("lookup_sequence", TORCH_BOX(&DeviceOperators::lookup_sequence));
    library.impl("lookup_pooled", TORCH_BOX(&DeviceOperators::lookup_pooled));
    library.impl("pooled_weights_grad", TORCH_BOX(&DeviceOperators::pooled_weights_grad));
    library.impl("gather_rows", TORCH_BOX(&DeviceOperators::gather_rows));
    library.impl("gather_rows.out", TORCH_BOX(&DeviceOperators::gather_rows_out));
    library.impl("scatter_rows", TORCH_BOX(&DeviceOperators::scatter_rows));
    library.impl("swap_rows", TORCH_BOX(&DeviceOperators::swap_rows));
    library.impl("swap_lookup_sequence", TORCH_BOX(&DeviceOperators::swap_lookup_sequence));
    library.impl("swap_lookup_pooled", TORCH_BOX(&DeviceOperators::swap_lookup_pooled));
    library.impl("update_rows", TORCH_BOX(&DeviceOperators::update_rows));
    library.impl("accumulate_rows", TORCH_BOX(&DeviceOperators::accumulate_rows));
  }

 private:
  // The workspace is freed when the operator returns, but the allocator reuses its memory only for later work
  // on the same stream.
  static Tensor workspace_of(const Tensor& on, const Segments& segments) {
    const int64_t bytes = Backend::segments_workspace(segments);
    return torch::stable::new_empty(on, {bytes}, ScalarType::Byte);
  }
};

}  // namespace rec_sdk
