#pragma once

#include "op_kernels/common/ascendc/one_mask.h"
#include "op_kernels/common/ascendc/stored_rows.h"

namespace rec_sdk {
namespace ascendc {

// Sums short bags of a feature, whose rows are in one tile, side by side. An instruction that depends on the
// previous one waits longer than the addition of a narrow row takes. The scalar unit limits these loops.
class BagGroup {
 public:
  static constexpr int64_t kMost = 16, kValues = 2048;  // bags, and values of their sums
  static constexpr int64_t kLongest = 32;               // rows of a bag: a block of sums
  static constexpr uint32_t kBytes = kValues * sizeof(float);

  __aicore__ inline void init(TPipe* pipe, int64_t width) {
    pitch_ = align_up(width, kWidthMultiple);
    most_ = minimum(kMost, kValues / pitch_);
    pipe->InitBuffer(divisors_, static_cast<uint32_t>(most_ * pitch_ * sizeof(float)));
  }
  // row_pitch: values between the starts of rows in their tile.
  __aicore__ inline void start(int64_t width, int64_t row_pitch) {
    width_ = static_cast<int32_t>(width);
    row_pitch_ = static_cast<uint32_t>(row_pitch);
  }

  __aicore__ inline int64_t most() const { return most_; }

  // Lists the first of `most` consecutive bags, which start at lookup `begin` and end at `ends`. The list
  // ends before the first bag that is empty, too long, or not within the first `rows` rows; it has at most
  // most() bags. Returns their number.
  __aicore__ inline int64_t list(int64_t begin, const LocalTensor<int64_t>& ends, int64_t most,
                                 int64_t rows) {
    const auto bags = static_cast<uint32_t>(minimum(most, most_));
    const auto first = static_cast<uint32_t>(begin),
               room = static_cast<uint32_t>(minimum<int64_t>(rows, 1 << 30));
    const uint32_t row_pitch = row_pitch_;
    uint32_t row = 0, count = 0, longest = 0;
    for (; count < bags; ++count) {
      const uint32_t end = static_cast<uint32_t>(ends.GetValue(count)) - first, length = end - row;
      if (length - 1 >= kLongest || end > room) break;
      bags_[count] = {row * row_pitch, length};
      longest = maximum(longest, length);
      row = end;
    }
    rows_ = row;
    longest_ = longest;
    equal_ = row == count * longest;
    return count;
  }
  // Returns the number of rows of the listed bags.
  __aicore__ inline int64_t rows() const { return rows_; }

  // Sets sums[i] to the sum or the mean of the rows of bag i, for i < count. sums: [count, pitch of the
  // sums], rows: [rows(), row_pitch].
  __aicore__ inline void add_up(const LocalTensor<float>& sums, const LocalTensor<float>& rows, int64_t count,
                                bool mean) {
    vector_barrier();
    if (equal_ && longest_ == 1 && packed()) {
      copy_values(sums, rows, count * width_);
    } else if (equal_ && longest_ > 1 && in_repeats()) {
      add_equal(sums, rows, count);
    } else if (equal_ && longest_ > 1 && in_blocks(count)) {
      add_narrow(sums, rows, static_cast<uint32_t>(count));
    } else {
      add_each(sums, rows, count);
    }
    if (mean) divide(sums, static_cast<uint32_t>(count));
  }

 private:
  struct Bag {
    uint32_t place, length;  // its rows
  };

  __aicore__ inline bool packed() const {
    return width_ == pitch_ && row_pitch_ == static_cast<uint32_t>(width_);
  }

  // Returns the UB blocks from one bag to the next, if all have the same length.
  __aicore__ inline uint32_t step() const { return longest_ * row_pitch_ / kFloats; }
  static constexpr uint32_t kFarthest = UINT8_MAX;  // the largest step that an instruction supports
  __aicore__ inline bool in_repeats() const { return width_ % OneMask::kRepeat == 0 && step() <= kFarthest; }
  // Returns whether add_narrow() needs fewer instructions than add_each().
  __aicore__ inline bool in_blocks(int64_t count) const {
    return width_ % kFloats == 0 && step() <= kFarthest && width_ < OneMask::kRepeat &&
           width_ <= count * kFloats;
  }

  // Sums bags of longest_ rows each, at least 2. One instruction adds 64 columns of one row of every bag.
  __aicore__ inline void add_equal(const LocalTensor<float>& sums, const LocalTensor<float>& rows,
                                   int64_t count) const {
    const auto width = static_cast<uint32_t>(width_);
    const auto to = static_cast<uint8_t>(pitch_ / kFloats);
    const auto from = static_cast<uint8_t>(step());
    OneMask::begin(count * OneMask::kRepeat);
    for (uint32_t column = 0; column < width; column += OneMask::kRepeat) {
      OneMask::add_repeats(sums[column], rows[column], rows[row_pitch_ + column], to, from, from);
    }
    for (uint32_t i = 2, place = 2 * row_pitch_; i < longest_; ++i, place += row_pitch_) {
      vector_barrier();
      for (uint32_t column = 0; column < width; column += OneMask::kRepeat) {
        OneMask::add_repeats(sums[column], sums[column], rows[place + column], to, to, from);
      }
    }
    OneMask::end();
  }

  // Sums bags of longest_ rows each, at least 2. One instruction adds 8 columns of one row of 8 bags.
  __aicore__ inline void add_narrow(const LocalTensor<float>& sums, const LocalTensor<float>& rows,
                                    uint32_t count) const {
    constexpr auto kBags = static_cast<uint32_t>(OneMask::kBlocks);
    const uint32_t bag = longest_ * row_pitch_, pitch = static_cast<uint32_t>(pitch_);
    for (uint32_t first = 0; first < count; first += kBags) {
      OneMask::begin(minimum(kBags, count - first) * kFloats);
      add_blocks(sums[first * pitch], rows[first * bag]);
      OneMask::end();
    }
  }
  __aicore__ inline void add_blocks(const LocalTensor<float>& sums, const LocalTensor<float>& rows) const {
    const auto to = static_cast<uint8_t>(pitch_ / kFloats), from = static_cast<uint8_t>(step());
    const auto width = static_cast<uint32_t>(width_), end = longest_ * row_pitch_;
    for (uint32_t column = 0; column < width; column += kFloats) {
      OneMask::add_blocks(sums[column], rows[column], rows[row_pitch_ + column], to, from, from);
    }
    for (uint32_t place = 2 * row_pitch_; place != end; place += row_pitch_) {
      vector_barrier();
      for (uint32_t column = 0; column < width; column += kFloats) {
        OneMask::add_blocks(sums[column], sums[column], rows[place + column], to, to, from);
      }
    }
  }

  __aicore__ inline void add_each(const LocalTensor<float>& sums, const LocalTensor<float>& rows,
                                  int64_t count) const {
    const auto pitch = static_cast<uint32_t>(pitch_), end = static_cast<uint32_t>(count) * pitch;
    OneMask::begin(width_);
    const Bag* bag = bags_;
    for (uint32_t to = 0; to != end; to += pitch, ++bag) begin_sum(sums[to], rows[bag->place], bag->length);
    for (uint32_t i = 2, place = 2 * row_pitch_; i < longest_; ++i, place += row_pitch_) {
      vector_barrier();
      const LocalTensor<float> row = rows[place];
      bag = bags_;
      for (uint32_t to = 0; to != end; to += pitch, ++bag) {
        if (i < bag->length) OneMask::add(sums[to], sums[to], row[bag->place]);
      }
    }
    OneMask::end();
  }

  // The first row is copied, or added to the second.
  __aicore__ inline void begin_sum(const LocalTensor<float>& sum, const LocalTensor<float>& rows,
                                   uint32_t length) const {
    if (length == 1) {
      OneMask::copy(sum, rows);
    } else {
      OneMask::add(sum, rows, rows[row_pitch_]);
    }
  }

  __aicore__ inline void divide(const LocalTensor<float>& sums, uint32_t count) {
    const LocalTensor<float> divisors = divisors_.Get<float>();
    const auto pitch = static_cast<uint32_t>(pitch_);
    for (uint32_t b = 0; b < count; ++b) {
      AscendC::Duplicate(divisors[b * pitch], static_cast<float>(bags_[b].length), width_);
    }
    vector_barrier();
    for (uint32_t b = 0; b < count; ++b) {
      AscendC::Div(sums[b * pitch], sums[b * pitch], divisors[b * pitch], width_);
    }
  }

  static constexpr int64_t kFloats = kUbBlock / sizeof(float);

  Bag bags_[kMost];
  Scratch divisors_;
  int64_t pitch_ = 0, most_ = 0, rows_ = 0;
  uint32_t row_pitch_ = 0, longest_ = 0;
  int32_t width_ = 0;
  bool equal_ = false;  // all of longest_ rows
};

}  // namespace ascendc
}  // namespace rec_sdk
