// What an optimizer does once a row: the mean of squares of the gradient, and begin_row on planes of one
// number a row, whose result then goes to every column.
#pragma once

#include "op_kernels/common/ascendc/record_tile.h"

namespace rec_sdk {
namespace ascendc {

class RowValues {
 public:
  __aicore__ inline void init(TPipe* pipe, const TilePlan& plan, int64_t dim) {
    plan_ = plan;
    dim_ = dim;
    pipe->InitBuffer(lanes_, static_cast<uint32_t>(plan.rows * kLanes * 4));
    pipe->InitBuffer(sums_, static_cast<uint32_t>(plan.rows * kRowPlanePitch * 4));
    pipe->InitBuffer(values_, static_cast<uint32_t>(plan.rows * kRowPlanePitch * 4));
    computed_.init(pipe);
    read_.init(pipe);
    AscendC::Duplicate(sums_.Get<float>(), 0.0f, static_cast<int32_t>(plan.rows * kRowPlanePitch));
  }

  // Adds the squares of these columns to the lanes; the first ones start anew. In the order of lane_sum.
  __aicore__ inline void add_squares(const Plane& g, int64_t rows, const TileColumns& columns) {
    const LocalTensor<float> lanes = lanes_.Get<float>();
    if (columns.column == 0) {
      read_.order();
      AscendC::Duplicate(lanes, 0.0f, static_cast<int32_t>(rows * kLanes));
      vector_barrier();
    }
    const Plane squares = g * g;
    for (int64_t k = 0; k < columns.width; k += kLanes) {
      const auto count = static_cast<int32_t>(minimum(kLanes, columns.width - k));
      for (int64_t r = 0; r < rows; ++r) {
        const LocalTensor<float> sum = lanes[static_cast<uint32_t>(r * kLanes)];
        AscendC::Add(sum, sum, squares.storage().data[static_cast<uint32_t>(r * plan_.pitch + k)], count);
      }
      vector_barrier();
    }
  }

  // For an optimizer that needs no mean.
  __aicore__ inline Plane zeros(PlanePool* pool, int64_t rows) {
    return Plane(pool, sums_.Get<float>(), static_cast<int32_t>(rows * kRowPlanePitch));
  }

  // Of the squares added.
  __aicore__ inline Plane mean_square(PlanePool* pool, int64_t rows) {
    const LocalTensor<float> lanes = lanes_.Get<float>(), sums = sums_.Get<float>();
    for (int64_t r = 0; r < rows; ++r) {
      const LocalTensor<float> low = lanes[static_cast<uint32_t>(r * kLanes)];
      AscendC::Add(low, low, lanes[static_cast<uint32_t>(r * kLanes + kLanes / 2)], kLanes / 2);
    }
    vector_barrier();
    computed_.order();
    for (int64_t r = 0; r < rows; ++r) {
      sums.SetValue(static_cast<uint32_t>(r * kRowPlanePitch), sum_of_half(lanes, r * kLanes));
    }
    read_.order();
    return Plane(pool, sums, static_cast<int32_t>(rows * kRowPlanePitch)) / static_cast<float>(dim_);
  }

  // Keeps what begin_row returned.
  __aicore__ inline void keep(const Plane& values, int64_t rows) {
    AscendC::Muls(values_.Get<float>(), values.storage().data, 1.0f,
                  static_cast<int32_t>(rows * kRowPlanePitch));
    vector_barrier();
  }

  // A row of equal numbers for each one kept.
  __aicore__ inline Plane broadcast(const Plane& like, int64_t rows) {
    const PlaneStorage plane = like.storage().another();
    const LocalTensor<float> values = values_.Get<float>();
    computed_.order();
    for (int64_t r = 0; r < rows; ++r) {
      AscendC::Duplicate(plane.data[static_cast<uint32_t>(r * plan_.pitch)],
                         values.GetValue(static_cast<uint32_t>(r * kRowPlanePitch)),
                         static_cast<int32_t>(plan_.pitch));
    }
    vector_barrier();
    read_.order();
    return Plane(plane);
  }

 private:
  // By the scalar unit: vector instructions start at whole UB blocks, and these are halves of one.
  __aicore__ inline float sum_of_half(const LocalTensor<float>& lanes, int64_t first) const {
    float lane[kLanes / 2];
    for (int64_t l = 0; l < kLanes / 2; ++l) lane[l] = lanes.GetValue(static_cast<uint32_t>(first + l));
    for (int64_t half = kLanes / 4; half > 0; half /= 2) {
      for (int64_t l = 0; l < half; ++l) lane[l] += lane[l + half];
    }
    return lane[0];
  }

  TilePlan plan_;
  int64_t dim_;
  Scratch lanes_, sums_, values_;
  Signal<HardEvent::V_S> computed_;
  Signal<HardEvent::S_V> read_;
};

}  // namespace ascendc
}  // namespace rec_sdk
