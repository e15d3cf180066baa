// Sums of the rows of a tile in the order of lane_sum in aggregate.h.
#pragma once

#include "op_kernels/common/ascendc/signal.h"

namespace rec_sdk {
namespace ascendc {

constexpr int64_t kLanes = 16;  // of lane_sum in aggregate.h

// Sums of the rows of a tile in the order of lane_sum: lane l adds columns l, l + 16, ..., then lane l gets
// lane l + 8, + 4, + 2, + 1. Gather turns 16 columns of the tile, so that lane l of all rows lies side by
// side: every step is one addition for the whole tile, and the results come out in order.
class LaneSums {
 public:
  static constexpr int64_t kMaxRows = 256;
  // Vectors of lanes of all rows.
  static __aicore__ inline constexpr int64_t vectors(int64_t sums) { return sums + 2; }
  static constexpr uint32_t kBytes = 3 * kMaxRows * kLanes * sizeof(float);  // of one sum

  // rows: of the largest tile, a multiple of 8, so that a lane is whole UB blocks; pitch: values from one to
  // the next; sums: of each row.
  __aicore__ inline void init(TPipe* pipe, int64_t rows, int64_t pitch, int64_t sums = 1) {
    pitch_ = pitch;
    count_ = sums;
    const auto bytes = static_cast<uint32_t>(rows * kLanes * sizeof(float));
    pipe->InitBuffer(sums_, bytes * static_cast<uint32_t>(sums));
    pipe->InitBuffer(turned_, bytes);
    pipe->InitBuffer(index_, bytes);
    indexed_.init(pipe);
    used_.init(pipe);
  }

  // A new tile of `present` rows, at least 1.
  __aicore__ inline void begin(int64_t present) {
    if (present != present_) index_rows(present);
    vector_barrier();
    AscendC::Duplicate(sums_.Get<float>(), 0.0f, static_cast<int32_t>(count_ * rows_ * kLanes));
    vector_barrier();
  }

  // The next `width` columns of the tile; those before were a multiple of 16.
  __aicore__ inline void add(const LocalTensor<float>& values, int64_t width, int64_t sum = 0) {
    const LocalTensor<float> sums = lanes_of(sum), turned = turned_.Get<float>();
    for (int64_t column = 0; column < width; column += kLanes) {
      const int64_t count = minimum(kLanes, width - column) * rows_;
      AscendC::Gather(turned, values, index_.Get<uint32_t>(), static_cast<uint32_t>(column * sizeof(float)),
                      static_cast<uint32_t>(count));
      vector_barrier();
      AscendC::Add(sums, sums, turned, static_cast<int32_t>(count));
      vector_barrier();
    }
  }

  // to[i] = the sum of row i; `to` has room for a multiple of 8.
  __aicore__ inline void finish(const LocalTensor<float>& to, int64_t sum = 0) {
    const LocalTensor<float> sums = lanes_of(sum);
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
      const int64_t count = half * rows_;
      AscendC::Add(half == 1 ? to : sums, sums, sums[static_cast<uint32_t>(count)],
                   static_cast<int32_t>(count));
      vector_barrier();
    }
  }

 private:
  __aicore__ inline LocalTensor<float> lanes_of(int64_t sum) {
    return sums_.Get<float>()[static_cast<uint32_t>(sum * rows_ * kLanes)];
  }

  // index[l * rows + i] = bytes before column l of row i. Rows up to a multiple of 8 repeat the last one.
  __aicore__ inline void index_rows(int64_t present) {
    rows_ = align_up(present, kUbBlock / sizeof(float));
    const LocalTensor<int32_t> index = index_.Get<int32_t>();
    used_.order();
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t bytes = minimum(i, present - 1) * pitch_ * static_cast<int64_t>(sizeof(float));
      index.SetValue(static_cast<uint32_t>(i), static_cast<int32_t>(bytes));
    }
    indexed_.order();
    for (int64_t l = 1; l < kLanes; ++l) {
      AscendC::Adds(index[static_cast<uint32_t>(l * rows_)], index, static_cast<int32_t>(l * sizeof(float)),
                    static_cast<int32_t>(rows_));
    }
    present_ = present;
  }

  int64_t rows_ = 0, pitch_ = 0, present_ = 0, count_ = 1;
  Scratch sums_, turned_, index_;
  Signal<HardEvent::S_V> indexed_;
  Signal<HardEvent::V_S> used_;
};

}  // namespace ascendc
}  // namespace rec_sdk
