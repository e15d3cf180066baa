// The numbers per row that an optimizer computes for a tile: the sums over the columns, and the values that
// begin_row computes from them, which are then broadcast to all columns. They are vectors with one number per
// row, computed for all rows of the tile at once. Gather converts between the layouts.
#pragma once

#include "op_kernels/common/ascendc/tile_plan.h"
#include "op_kernels/common/numbers.h"

namespace rec_sdk {
namespace ascendc {

// Broadcasts each number of a vector to a row of `pitch` equal numbers.
class Spread {
 public:
  // rows: number of rows of the longest vector.
  __aicore__ inline void init(TPipe* pipe, int64_t rows, int64_t pitch) {
    pitch_ = pitch;
    group_ = maximum<int64_t>(1, minimum(rows, kSpreadIndex / pitch));
    pipe->InitBuffer(index_, static_cast<uint32_t>(group_ * pitch * sizeof(int32_t)));
    const LocalTensor<int32_t> index =
        index_.Get<int32_t>();  // position in bytes of the number of each element
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
  int64_t pitch_, group_;  // number of rows that one instruction broadcasts
  Scratch index_;
};

// kSums and kValues are the maximum numbers of sums and of values of any of the kPasses passes.
template <int kPasses, int kSums, int kValues>
class RowValues {
 public:
  static constexpr RowNeeds kNeeds{kSums, kPasses * kSums + kValues};

  __aicore__ inline void init(TPipe* pipe, const TilePlan& plan, const RecordShape& shape) {
    row_states_ = shape.row_states;
    rows_ = align_up(plan.rows, kUbBlock / 4);
    lanes_.init(pipe, rows_, plan.pitch, kSums);
    columns_.init(pipe, plan.rows, plan.pitch);
    pipe->InitBuffer(numbers_, static_cast<uint32_t>(kNeeds.vectors * rows_ * 4));
    if (row_states_ > 0) init_states(pipe, plan, shape);
  }

  // Adds the terms of these columns to the sums; the first columns start new sums.
  template <int kCount>
  __aicore__ inline void add(const Numbers<Plane, kCount>& terms, int64_t rows, const TileColumns& columns) {
    if (columns.column == 0) lanes_.begin(rows);
    for (int i = 0; i < kCount; ++i) lanes_.add(terms.each[i].storage().data, columns.width, i);
  }
  // Called when all columns of the pass are added.
  template <int kCount>
  __aicore__ inline void finish(int64_t pass) {
    for (int i = 0; i < kCount; ++i) lanes_.finish(sum(pass, i), i);
  }
  template <int kCount>
  __aicore__ inline Numbers<Plane, kCount> sums(PlanePool* pool, int64_t pass, int64_t rows) {
    return views<kCount>(pool, pass * kSums, rows);
  }

  // Returns the values that keep() stored last.
  template <int kCount>
  __aicore__ inline Numbers<Plane, kCount> values(PlanePool* pool, int64_t rows) {
    return views<kCount>(pool, kPasses * kSums, rows);
  }
  template <int kCount>
  __aicore__ inline void keep(const Numbers<Plane, kCount>& values, int64_t rows) {
    for (int i = 0; i < kCount; ++i) copy_values(value(i), values.each[i].storage().data, rows);
    vector_barrier();
  }
  // Returns rows for each value that keep() stored, in which the value of a row is repeated in all columns.
  template <int kCount>
  __aicore__ inline Numbers<Plane, kCount> broadcast(const Plane& like, int64_t rows) {
    static_assert(kCount == 1 || kCount == 2, "the values of a row");
    if constexpr (kCount == 1) {
      return {{spread(like, 0, rows)}};
    } else {
      return {{spread(like, 0, rows), spread(like, 1, rows)}};
    }
  }

  // take_state() gathers row state s from the loaded records into a vector, and returns it; put_state()
  // spreads the vector to rows that are the plan's row_pitch apart.
  __aicore__ inline LocalTensor<float> take_state(int64_t s, const LocalTensor<float>& from, int64_t rows) {
    const LocalTensor<float> state = this->state(s);
    AscendC::Gather(state, from, state_index_.Get<uint32_t>(), first_state_, static_cast<uint32_t>(rows));
    vector_barrier();
    return state;
  }
  __aicore__ inline void put_state(int64_t s, const LocalTensor<float>& to, int64_t rows) {
    state_rows_.run(to, state(s), rows);
  }
  // Returns the vector of row state s.
  __aicore__ inline LocalTensor<float> state(int64_t s) {
    return states_.Get<float>()[static_cast<uint32_t>(s * rows_)];
  }

 private:
  __aicore__ inline LocalTensor<float> number(int64_t i) {
    return numbers_.Get<float>()[static_cast<uint32_t>(i * rows_)];
  }
  __aicore__ inline LocalTensor<float> sum(int64_t pass, int64_t i) { return number(pass * kSums + i); }
  __aicore__ inline LocalTensor<float> value(int64_t i) { return number(kPasses * kSums + i); }

  template <int kCount>
  __aicore__ inline Numbers<Plane, kCount> views(PlanePool* pool, int64_t first, int64_t rows) {
    Numbers<Plane, kCount> planes;
    for (int i = 0; i < kCount; ++i) planes.each[i].view(pool, number(first + i), static_cast<int32_t>(rows));
    return planes;
  }
  __aicore__ inline Plane spread(const Plane& like, int64_t i, int64_t rows) {
    const PlaneStorage plane = like.storage().another();
    columns_.run(plane.data, value(i), rows);
    return Plane(plane);
  }

  __aicore__ inline void init_states(TPipe* pipe, const TilePlan& plan, const RecordShape& shape) {
    state_rows_.init(pipe, plan.rows, plan.row_pitch);
    first_state_ = plan.joined ? static_cast<uint32_t>(shape.dim * shape.weight_bytes) : 0;
    pipe->InitBuffer(states_, static_cast<uint32_t>(row_states_ * rows_ * 4));
    pipe->InitBuffer(state_index_, static_cast<uint32_t>(rows_ * sizeof(int32_t)));
    const LocalTensor<int32_t> index = state_index_.Get<int32_t>();
    const int64_t step =
        plan.joined ? plan.pitch * shape.weight_bytes : plan.row_pitch * static_cast<int64_t>(sizeof(float));
    begin_steps(index, step);
    indexed_.init(pipe);
    indexed_.order();
    continue_steps(index, rows_, step);
  }

  int64_t row_states_, rows_;
  uint32_t first_state_ = 0;  // bytes from the start of a row to its state
  LaneSums lanes_;
  Spread columns_, state_rows_;
  Scratch numbers_, states_, state_index_;
  Signal<HardEvent::S_V> indexed_;
};

}  // namespace ascendc
}  // namespace rec_sdk
