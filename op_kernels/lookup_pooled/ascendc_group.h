#pragma once

#include "op_kernels/common/ascendc/stored_rows.h"

namespace rec_sdk {
namespace ascendc {

// Short bags whose rows lie in one tile are added up side by side: an instruction that waits for the one
// before takes longer than a narrow row.
class BagGroup {
 public:
  static constexpr int64_t kMost = 8, kValues = 512;  // bags, and values of their sums
  static constexpr uint32_t kBytes = kValues * sizeof(float);

  __aicore__ inline void init(TPipe* pipe, int64_t width) {
    pitch_ = align_up(width, kWidthMultiple);
    most_ = minimum(kMost, kValues / pitch_);
    pipe->InitBuffer(divisors_, static_cast<uint32_t>(most_ * pitch_ * sizeof(float)));
  }
  __aicore__ inline void start(int64_t width) { width_ = static_cast<int32_t>(width); }

  // Whether there is room for two at all.
  __aicore__ inline bool useful() const { return most_ > 1; }
  __aicore__ inline bool empty() const { return count_ == 0; }
  __aicore__ inline bool full() const { return count_ == most_; }

  // `rows`: the first of its rows, which stay where they are until finish().
  __aicore__ inline void add(const LocalTensor<float>& sum, const LocalTensor<float>& rows, int64_t length,
                             bool mean) {
    bags_[count_++] = {sum, rows, length, mean};
    longest_ = maximum(longest_, length);
  }

  // Adds all of them up; `pitch`: of their rows.
  __aicore__ inline void finish(int64_t pitch) {
    if (count_ == 0) return;
    for (int64_t i = 0; i < maximum<int64_t>(1, longest_ - 1); ++i) {
      vector_barrier();
      for (int64_t b = 0; b < count_; ++b) add_row(bags_[b], i, pitch);
    }
    divide();
    count_ = longest_ = 0;
  }

 private:
  struct Bag {
    LocalTensor<float> sum, rows;
    int64_t length;
    bool mean;
  };

  // Row i + 1; the first one is copied, or added to the second.
  __aicore__ inline void add_row(const Bag& bag, int64_t i, int64_t pitch) {
    if (i == 0 && bag.length == 1) return copy_values(bag.sum, bag.rows, width_);
    if (i + 1 >= bag.length) return;
    AscendC::Add(bag.sum, i == 0 ? bag.rows : bag.sum, bag.rows[static_cast<uint32_t>((i + 1) * pitch)],
                 width_);
  }

  __aicore__ inline void divide() {
    bool any = false;
    for (int64_t b = 0; b < count_; ++b) {
      if (!bags_[b].mean) continue;
      AscendC::Duplicate(divisor(b), static_cast<float>(bags_[b].length), width_);
      any = true;
    }
    if (!any) return;
    vector_barrier();
    for (int64_t b = 0; b < count_; ++b) {
      if (bags_[b].mean) AscendC::Div(bags_[b].sum, bags_[b].sum, divisor(b), width_);
    }
  }
  __aicore__ inline LocalTensor<float> divisor(int64_t b) {
    return divisors_.Get<float>()[static_cast<uint32_t>(b * pitch_)];
  }

  Bag bags_[kMost];
  Scratch divisors_;
  int64_t pitch_ = 0, most_ = 0, count_ = 0, longest_ = 0;
  int32_t width_ = 0;
};

}  // namespace ascendc
}  // namespace rec_sdk
