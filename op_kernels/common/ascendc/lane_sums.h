// Sums of the rows of a tile in the order of lane_sum in aggregate.h.
#pragma once

#include "op_kernels/common/ascendc/one_mask.h"
#include "op_kernels/common/ascendc/steps.h"

namespace rec_sdk {
namespace ascendc {

constexpr int64_t kLanes = 16;  // as in lane_sum in aggregate.h

// Rounds `pitch` up to an odd multiple of `unit`, which is 8 or 16. With this pitch, one block of 8 columns
// of 8 consecutive rows lies in 8 of the 16 bank groups of UB, so the 8 blocks are read at once.
__aicore__ inline constexpr int64_t spread_pitch(int64_t pitch, int64_t unit) {
  return (pitch / unit | 1) * unit;
}

// Combines lanes by addition.
struct SumOfLanes {
  __aicore__ inline static void strided(const LocalTensor<float>& to, const LocalTensor<float>& values,
                                        uint8_t block, uint8_t repeat) {
    OneMask::add_strided(to, values, block, repeat);
  }
  __aicore__ inline static void all(const LocalTensor<float>& to, const LocalTensor<float>& a,
                                    const LocalTensor<float>& b, int32_t count) {
    AscendC::Add(to, a, b, count);
  }
};
// Combines lanes of non-negative numbers by their maximum. Their bits are compared as integers, which have
// the same order, with NaN above all numbers.
struct LargestOfLanes {
  __aicore__ inline static void strided(const LocalTensor<float>& to, const LocalTensor<float>& values,
                                        uint8_t block, uint8_t repeat) {
    OneMask::largest_strided(to, values, block, repeat);
  }
  __aicore__ inline static void all(const LocalTensor<float>& to, const LocalTensor<float>& a,
                                    const LocalTensor<float>& b, int32_t count) {
    AscendC::Max(to.ReinterpretCast<int32_t>(), a.ReinterpretCast<int32_t>(), b.ReinterpretCast<int32_t>(),
                 count);
  }
};

// Sums of the rows of a tile in the order of lane_sum: lane l adds columns l, l + 16, ..., then lanes l + 8,
// + 4, + 2, + 1 are added to lane l. The lanes of a row are two UB blocks, and one instruction adds a block
// of all rows. At the end Gather transposes the lanes, so that lane l of all rows is consecutive. Every step
// is then one addition for the whole tile, and the results are in order.
class LaneSums {
 public:
  // Floats of UB per row: the lanes of the sums, the transposed lanes of one sum, their index, and the row's
  // result.
  static __aicore__ inline constexpr int64_t floats_of_row(int64_t sums) { return (sums + 2) * kLanes + 1; }

  // rows: number of rows of the largest tile; pitch: values between the starts of rows, whole UB blocks;
  // sums: number of sums per row.
  __aicore__ inline void init(TPipe* pipe, int64_t rows, int64_t pitch, int64_t sums = 1) {
    rows_ = align_up(rows, kFloats);
    pitch_ = pitch;
    sum_count_ = sums;
    const auto bytes = static_cast<uint32_t>(rows_ * kLanes * sizeof(float));
    pipe->InitBuffer(sums_, bytes * static_cast<uint32_t>(sums));
    pipe->InitBuffer(turned_, bytes);
    pipe->InitBuffer(index_, bytes);
    pipe->InitBuffer(row_index_, static_cast<uint32_t>(rows_ * sizeof(int32_t)));
    const LocalTensor<int32_t> row_index = row_index_.Get<int32_t>(), index = index_.Get<int32_t>();
    const int64_t row_bytes = pitch * static_cast<int64_t>(sizeof(float));
    begin_steps(row_index, row_bytes);
    begin_steps(index, kUbBlock);
    indexed_.init(pipe);
    indexed_.order();
    continue_steps(row_index, rows_, row_bytes);
    continue_steps(index, rows_, kUbBlock);
    index_lanes(index);
  }

  // Begins a tile of `present` rows, at least 1.
  __aicore__ inline void begin(int64_t present) {
    present_ = present;
    vector_barrier();
    AscendC::Duplicate(sums_.Get<float>(), 0.0f, static_cast<int32_t>(sum_count_ * rows_ * kLanes));
    vector_barrier();
  }

  // Adds the next `width` columns of the tile; the number of columns before them must be a multiple of 16.
  template <class Fold = SumOfLanes>
  __aicore__ inline void add(const LocalTensor<float>& values, int64_t width, int64_t sum = 0) {
    const LocalTensor<float> sums = lanes_of(sum);
    const int64_t whole = align_down(width, kFloats), group = rows_of_instruction();
    for (int64_t row = 0; row < present_; row += group) {
      add_blocks<Fold>(sums[static_cast<uint32_t>(row * kFloats)],
                       values[static_cast<uint32_t>(row * pitch_)], minimum(group, present_ - row), whole);
    }
    turned_early_ = whole < width;
    if (turned_early_) add_columns<Fold>(sums, values, whole, width);
  }

  // Writes to[i] = the sum of row i; `to` must hold the maximum number of rows, rounded up to a multiple of
  // 8.
  template <class Fold = SumOfLanes>
  __aicore__ inline void finish(const LocalTensor<float>& to, int64_t sum = 0) {
    LocalTensor<float> lanes = lanes_of(sum);
    int64_t half = kLanes / 2;
    if (!turned_early_) {
      add_half<Fold>(lanes, lanes, half);
      half /= 2;
      turn(lanes, kLanes / 2);
      lanes = turned_.Get<float>();
    }
    for (; half > 1; half /= 2) add_half<Fold>(lanes, lanes, half);
    add_half<Fold>(to, lanes, 1);
  }

 private:
  static constexpr int64_t kFloats = kUbBlock / sizeof(float);
  static constexpr int64_t kFarthest = 255;  // the largest distance in blocks that an instruction supports

  // Returns the number of rows whose blocks one instruction can add.
  __aicore__ inline int64_t rows_of_instruction() const {
    if (pitch_ <= kFarthest) return present_;  // 8 rows are 8 pitches of a float, in blocks of 8
    return pitch_ / kFloats <= kFarthest ? kFloats : 1;
  }

  // Adds the whole blocks of 8 columns of `rows` rows to the lanes of these rows; lanes are [2, rows_, 8].
  template <class Fold>
  __aicore__ inline void add_blocks(const LocalTensor<float>& sums, const LocalTensor<float>& values,
                                    int64_t rows, int64_t width) {
    const bool one = rows == 1;
    const auto block = static_cast<uint8_t>(one ? 1 : pitch_ / kFloats);
    const auto repeat = static_cast<uint8_t>(rows <= kFloats ? 1 : pitch_);
    const LocalTensor<float> right = sums[static_cast<uint32_t>(rows_ * kFloats)];
    const auto end = static_cast<uint32_t>(width);
    uint32_t column = 0;
    OneMask::begin(rows * kFloats);
    for (; column + kFloats < end; column += kLanes) {
      Fold::strided(sums, values[column], block, repeat);
      Fold::strided(right, values[column + kFloats], block, repeat);
      vector_barrier();
    }
    if (column < end) {
      Fold::strided(sums, values[column], block, repeat);
      vector_barrier();
    }
    OneMask::end();
  }

  // Columns that fill no block are added lane by lane at the end, so the lanes are transposed first.
  template <class Fold>
  __aicore__ inline void add_columns(const LocalTensor<float>& sums, const LocalTensor<float>& values,
                                     int64_t begin, int64_t end) {
    const LocalTensor<float> turned = turned_.Get<float>();
    turn(sums, kLanes);
    copy_values(sums, turned, rows_ * kLanes);
    vector_barrier();
    for (int64_t column = begin; column < end; ++column) {
      const LocalTensor<float> lane = sums[static_cast<uint32_t>(column % kLanes * rows_)];
      AscendC::Gather(turned, values, row_index_.Get<uint32_t>(),
                      static_cast<uint32_t>(column * sizeof(float)), static_cast<uint32_t>(present_));
      vector_barrier();
      Fold::all(lane, lane, turned, static_cast<int32_t>(present_));
      vector_barrier();
    }
  }

  // Transposes the lanes: turned[l][i] = lane l of row i.
  __aicore__ inline void turn(const LocalTensor<float>& sums, int64_t lanes) {
    AscendC::Gather(turned_.Get<float>(), sums, index_.Get<uint32_t>(), 0,
                    static_cast<uint32_t>(lanes * rows_));
    vector_barrier();
  }

  // Adds lanes [half, 2 * half) to lanes [0, half); a lane, or a column of the blocks, has rows_ values.
  template <class Fold>
  __aicore__ inline void add_half(const LocalTensor<float>& to, const LocalTensor<float>& lanes,
                                  int64_t half) {
    const auto count = static_cast<int32_t>(half * rows_);
    Fold::all(to, lanes, lanes[static_cast<uint32_t>(count)], count);
    vector_barrier();
  }

  // Computes index[l * rows + i] = the bytes before lane l of row i; the caller has set the entries of lane
  // 0.
  __aicore__ inline void index_lanes(const LocalTensor<int32_t>& index) const {
    for (int64_t l = 1; l < kLanes; ++l) {
      const int64_t before = l / kFloats * rows_ * kFloats + l % kFloats;
      AscendC::Adds(index[static_cast<uint32_t>(l * rows_)], index,
                    static_cast<int32_t>(before * sizeof(float)), static_cast<int32_t>(rows_));
    }
    vector_barrier();
  }

  __aicore__ inline LocalTensor<float> lanes_of(int64_t sum) {
    return sums_.Get<float>()[static_cast<uint32_t>(sum * rows_ * kLanes)];
  }

  int64_t rows_ = 0, pitch_ = 0, present_ = 0, sum_count_ = 1;
  bool turned_early_ = false;
  Scratch sums_, turned_, index_, row_index_;
  Signal<HardEvent::S_V> indexed_;
};

}  // namespace ascendc
}  // namespace rec_sdk
