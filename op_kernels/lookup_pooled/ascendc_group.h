#pragma once

#include "op_kernels/common/ascendc/one_mask.h"
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
    vector_barrier();
    OneMask::begin(width_);
    const auto to_next = static_cast<uint32_t>(pitch);
    for (int64_t b = 0; b < count_; ++b) begin_sum(bags_[b], to_next);
    uint32_t place = 2 * to_next;
    for (int64_t i = 2; i < longest_; ++i, place += to_next) {
      vector_barrier();
      for (int64_t b = 0; b < count_; ++b) {
        const Bag& bag = bags_[b];
        if (i < bag.length) OneMask::add(bag.sum, bag.sum, bag.rows[place]);
      }
    }
    OneMask::end();
    divide();
    count_ = longest_ = 0;
  }

 private:
  struct Bag {
    LocalTensor<float> sum, rows;
    int64_t length;
    bool mean;
  };

  // The first row is copied, or added to the second.
  __aicore__ inline void begin_sum(const Bag& bag, uint32_t pitch) {
    if (bag.length == 1) {
      OneMask::copy(bag.sum, bag.rows);
    } else {
      OneMask::add(bag.sum, bag.rows, bag.rows[pitch]);
    }
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
