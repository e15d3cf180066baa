// The norms of the gradients of a tile's rows, which an update computes on request: the sum of squares of
// each row, in the order of lane_sum in aggregate.h, and the largest magnitude.
#pragma once

#include "op_kernels/common/ascendc/tile_plan.h"

namespace rec_sdk {
namespace ascendc {

class RowNorms {
 public:
  enum Norm { kSquares, kLargest, kNorms };

  // Floats of UB per row: the lanes, and two sets of results, one of which is stored while the other is
  // computed.
  static constexpr int64_t kFloatsOfRow = LaneSums::floats_of_row(kNorms) + 2 * kNorms;

  // to: the norms of all rows in GM, [kNorms, all_rows].
  __aicore__ inline void init(TPipe* pipe, const TilePlan& plan, float* to, int64_t all_rows) {
    rows_ = align_up(plan.rows, kUbBlock / 4);
    to_ = to;
    all_rows_ = all_rows;
    lanes_.init(pipe, rows_, plan.pitch, kNorms);
    pipe->InitBuffer(counted_, static_cast<uint32_t>(2 * kNorms * rows_ * 4));
  }

  // Adds these columns of the tile; the first columns start new sums. Engine: vector unit.
  __aicore__ inline void count(const Plane& gradients, int64_t rows, const TileColumns& columns, int64_t dim,
                               int set) {
    if (columns.column == 0) lanes_.begin(rows);
    const Plane terms = gradients * gradients;
    const PlaneStorage& at = terms.storage();
    lanes_.add(at.data, columns.width, kSquares);
    AscendC::Abs(at.data, gradients.storage().data, at.count);
    vector_barrier();
    lanes_.add<LargestOfLanes>(at.data, columns.width, kLargest);
    if (columns.column + columns.width < dim) return;
    lanes_.finish(counted(set, kSquares), kSquares);
    lanes_.finish<LargestOfLanes>(counted(set, kLargest), kLargest);
  }

  // Stores the norms once all columns of the tile are added. Engine: MTE3.
  __aicore__ inline void store_rows(int set, int64_t first, int64_t rows) {
    for (int norm = 0; norm < kNorms; ++norm) {
      store(to_ + norm * all_rows_ + first, counted(set, norm), rows);
    }
  }

 private:
  __aicore__ inline LocalTensor<float> counted(int set, int64_t norm) {
    return counted_.Get<float>()[static_cast<uint32_t>((set * kNorms + norm) * rows_)];
  }

  int64_t rows_ = 0, all_rows_ = 0;
  float* to_ = nullptr;
  LaneSums lanes_;
  Landing counted_;
};

}  // namespace ascendc
}  // namespace rec_sdk
