// The arguments that update_rows and accumulate_rows share.
#pragma once

#include "torch_npu_ext/ops/arguments.h"
#include "torch_npu_ext/ops/check.h"

namespace rec_sdk {

inline Segments segments_of(const Checker& check, const Tensor& grad, const Tensor& unique_slots,
                            const Tensor& segment_offsets, const Tensor& grad_row,
                            const OptionalTensor& grad_column, const OptionalTensor& scale, int64_t dim) {
  Segments segments{};
  segments.dim = dim;
  segments.rows = unique_slots.numel();
  segments.unique_slots = check.vector<const int32_t>("unique_slots", unique_slots, ScalarType::Int);
  segments.offsets =
      check.vector<const int32_t>("segment_offsets", segment_offsets, ScalarType::Int, segments.rows + 1);
  Lookups& lookups = segments.lookups;
  lookups.grad = check.matrix("grad", grad);
  lookups.grad_stride = grad.stride(0);
  lookups.count = grad_row.numel();
  check.require(lookups.count == 0 || grad.size(1) >= dim, "grad must have at least ", dim, " columns, got ",
                grad.size(1));
  lookups.grad_rows = grad.size(0);
  lookups.grad_columns = grad.size(1);
  lookups.grad_row = check.vector<const int32_t>("grad_row", grad_row, ScalarType::Int);
  if (grad_column.has_value()) {
    lookups.grad_column =
        check.vector<const int32_t>("grad_column", *grad_column, ScalarType::Int, lookups.count);
  }
  if (scale.has_value()) {
    lookups.scale = check.vector<const float>("scale", *scale, ScalarType::Float, lookups.count);
  }
  return segments;
}

}  // namespace rec_sdk
