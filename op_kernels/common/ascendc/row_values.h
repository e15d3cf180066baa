// What an optimizer does once a row: the mean of squares of the gradient, and begin_row on planes of one
// number a row, whose result then goes to every column. Always for all rows of the tile at once; Gather
// brings the numbers from one layout to the next.
#pragma once

#include "op_kernels/common/ascendc/tile_plan.h"

namespace rec_sdk {
namespace ascendc {

// A row of `pitch` equal numbers for each number of a vector.
class Spread {
 public:
  // rows: of the longest vector.
  __aicore__ inline void init(TPipe* pipe, int64_t rows, int64_t pitch) {
    pitch_ = pitch;
    group_ = maximum<int64_t>(1, minimum(rows, kSpreadIndex / pitch));
    pipe->InitBuffer(index_, static_cast<uint32_t>(group_ * pitch * sizeof(int32_t)));
    const LocalTensor<int32_t> index =
        index_.Get<int32_t>();  // where the number of each element is, in bytes
    AscendC::Duplicate(index, 0, static_cast<int32_t>(pitch));
    for (int64_t n = 1; n < group_; n *= 2) {
      vector_barrier();
      AscendC::Adds(index[static_cast<uint32_t>(n * pitch)], index, static_cast<int32_t>(n * sizeof(float)),
                    static_cast<int32_t>(minimum(n, group_ - n) * pitch));
    }
  }

  __aicore__ inline void run(const LocalTensor<float>& to, const LocalTensor<float>& from, int64_t rows) {
    for (int64_t first = 0; first < rows; first += group_) {
      AscendC::Gather(to[static_cast<uint32_t>(first * pitch_)], from, index_.Get<uint32_t>(),
                      static_cast<uint32_t>(first * sizeof(float)),
                      static_cast<uint32_t>(minimum(group_, rows - first) * pitch_));
    }
    vector_barrier();
  }

 private:
  int64_t pitch_, group_;  // rows that one instruction spreads
  Scratch index_;
};

class RowValues {
 public:
  __aicore__ inline void init(TPipe* pipe, const TilePlan& plan, const RecordShape& shape) {
    dim_ = shape.dim;
    row_states_ = shape.row_states;
    rows_ = align_up(plan.rows, kUbBlock / 4);
    lanes_.init(pipe, rows_, plan.pitch);
    columns_.init(pipe, plan.rows, plan.pitch);
    pipe->InitBuffer(means_, static_cast<uint32_t>(rows_ * 4));
    pipe->InitBuffer(values_, static_cast<uint32_t>(rows_ * 4));
    if (row_states_ > 0) init_states(pipe, plan.rows);
  }

  // Adds the squares of these columns to the lanes; the first ones start anew.
  __aicore__ inline void add_squares(const Plane& g, int64_t rows, const TileColumns& columns) {
    if (columns.column == 0) lanes_.begin(rows);
    const Plane squares = g * g;
    lanes_.add(squares.storage().data, columns.width);
  }

  // Of the squares added.
  __aicore__ inline Plane mean_square(PlanePool* pool, int64_t rows) {
    lanes_.finish(means_.Get<float>());
    return Plane(pool, means_.Get<float>(), static_cast<int32_t>(rows)) / static_cast<float>(dim_);
  }

  // For an optimizer that needs no mean.
  __aicore__ inline Plane zeros(PlanePool* pool, int64_t rows) {
    AscendC::Duplicate(means_.Get<float>(), 0.0f, static_cast<int32_t>(rows));
    vector_barrier();
    return Plane(pool, means_.Get<float>(), static_cast<int32_t>(rows));
  }

  // Row state s as a vector, from where its numbers lie kRowPlanePitch apart, and back.
  __aicore__ inline LocalTensor<float> take_state(int64_t s, const LocalTensor<float>& from, int64_t rows) {
    const LocalTensor<float> state = states_.Get<float>()[static_cast<uint32_t>(s * rows_)];
    AscendC::Gather(state, from, state_index_.Get<uint32_t>(), 0, static_cast<uint32_t>(rows));
    vector_barrier();
    return state;
  }
  __aicore__ inline void put_state(int64_t s, const LocalTensor<float>& to, int64_t rows) {
    state_rows_.run(to, states_.Get<float>()[static_cast<uint32_t>(s * rows_)], rows);
  }

  // Keeps what begin_row returned.
  __aicore__ inline void keep(const Plane& values, int64_t rows) {
    copy_values(values_.Get<float>(), values.storage().data, rows);
    vector_barrier();
  }

  // A row of equal numbers for each one kept.
  __aicore__ inline Plane broadcast(const Plane& like, int64_t rows) {
    const PlaneStorage plane = like.storage().another();
    columns_.run(plane.data, values_.Get<float>(), rows);
    return Plane(plane);
  }

 private:
  __aicore__ inline void init_states(TPipe* pipe, int64_t rows) {
    constexpr int64_t kStep = kRowPlanePitch * sizeof(float), kFirst = kUbBlock / 4;
    state_rows_.init(pipe, rows, kRowPlanePitch);
    pipe->InitBuffer(states_, static_cast<uint32_t>(row_states_ * rows_ * 4));
    pipe->InitBuffer(state_index_, static_cast<uint32_t>(rows_ * sizeof(int32_t)));
    const LocalTensor<int32_t> index = state_index_.Get<int32_t>();
    for (int64_t i = 0; i < kFirst; ++i)
      index.SetValue(static_cast<uint32_t>(i), static_cast<int32_t>(i * kStep));
    indexed_.init(pipe);
    indexed_.order();
    for (int64_t n = kFirst; n < rows_; n *= 2) {
      AscendC::Adds(index[static_cast<uint32_t>(n)], index, static_cast<int32_t>(n * kStep),
                    static_cast<int32_t>(minimum(n, rows_ - n)));
      vector_barrier();
    }
  }

  int64_t dim_, row_states_, rows_;
  LaneSums lanes_;
  Spread columns_, state_rows_;
  Scratch means_, values_, states_, state_index_;
  Signal<HardEvent::S_V> indexed_;
};

}  // namespace ascendc
}  // namespace rec_sdk
