// Conversion of the arguments that update_rows and accumulate_rows have in common.
#pragma once

#include <vector>

#include "torch_npu_ext/ops/arguments.h"
#include "torch_npu_ext/ops/check.h"

namespace rec_sdk {

// Checks the arguments and returns them as Segments. `grads` must outlive the result.
inline Segments segments_of(const Checker& check, const Gradients& grads, const Tensor& unique_slots,
                            const Tensor& segment_offsets, const Tensor& grad_row,
                            const OptionalTensor& grad_source, const OptionalTensor& grad_column,
                            const OptionalTensor& scale, const OptionalTensor& hot_segments, int64_t dim) {
  Segments segments{};
  segments.dim = dim;
  segments.rows = unique_slots.numel();
  segments.unique_slots = check.vector<const int32_t>("unique_slots", unique_slots, ScalarType::Int);
  segments.offsets =
      check.vector<const int32_t>("segment_offsets", segment_offsets, ScalarType::Int, segments.rows + 1);
  Lookups& lookups = segments.lookups;
  lookups.grad = grads.front();
  lookups.grads = grads.data();
  lookups.grad_count = static_cast<int64_t>(grads.size());
  lookups.grad_row = check.vector<const int32_t>("grad_row", grad_row, ScalarType::Int);
  lookups.count = grad_row.numel();
  for (size_t i = 0; i < grads.size(); ++i) {
    const bool read = lookups.count > 0 && grads[i].rows > 0;
    check.require(!read || grads[i].columns >= dim, "grads[", i, "] must have at least ", dim,
                  " columns, got ", grads[i].columns);
  }
  check.require(grad_source.has_value() || grads.size() == 1, "grad_source must say which of the ",
                grads.size(), " grads each lookup reads, got None");
  if (grad_source.has_value()) {
    lookups.grad_source =
        check.vector<const int32_t>("grad_source", *grad_source, ScalarType::Int, lookups.count);
  }
  if (grad_column.has_value()) {
    lookups.grad_column =
        check.vector<const int32_t>("grad_column", *grad_column, ScalarType::Int, lookups.count);
  }
  if (scale.has_value()) {
    lookups.scale = check.vector<const float>("scale", *scale, ScalarType::Float, lookups.count);
  }
  if (hot_segments.has_value()) {
    constexpr int64_t kFields = sizeof(HotSegment) / sizeof(int32_t);
    check.tensor("hot_segments", *hot_segments, ScalarType::Int, 2);
    check.contiguous("hot_segments", *hot_segments);
    check.require(hot_segments->size(1) == kFields, "hot_segments must have ", kFields, " columns, got ",
                  hot_segments->size(1));
    segments.hot_segments = static_cast<const HotSegment*>(hot_segments->data_ptr());
    segments.hot_segment_count = hot_segments->size(0);
  }
  return segments;
}

}  // namespace rec_sdk
