// Stochastic rounding of a tile of weights, with the results of store(value, random) in convert.h. The
// weights are rounded to numbers that 16 bits can represent, so the following conversion does not change
// them. Magnitudes beyond the largest finite number are not changed here; the conversion rounds them to
// nearest.
//
// The vector unit of arch 2201 has no logical instructions for 32 bits. A mask is 0 or -1, from the sign of a
// difference, and selects by multiplication.
#pragma once

#include "op_kernels/common/ascendc/planes.h"
#include "op_kernels/common/ascendc/signal.h"
#include "op_kernels/common/convert.h"
#include "op_kernels/common/rounding.h"

namespace rec_sdk {
namespace ascendc {

class StochasticRounding {
 public:
  static constexpr int kPlanes = 4;      // planes of the pool, which are free after the formula
  static constexpr int64_t kShared = 1;  // numbers per column of a tile

  __aicore__ inline void init(TPipe* pipe, int64_t pitch) {
    pitch_ = static_cast<int32_t>(pitch);
    pipe->InitBuffer(columns_, static_cast<uint32_t>(kShared * pitch * 4));
    const Ints columns = columns_.Get<int32_t>();
    for (int32_t k = 0; k < kFirst; ++k) columns.SetValue(static_cast<uint32_t>(k), k);
    indexed_.init(pipe);
    indexed_.order();
    for (int32_t n = kFirst; n < pitch_; n *= 2) {
      AscendC::Adds(columns[static_cast<uint32_t>(n)], columns, n, minimum(n, pitch_ - n));
      vector_barrier();
    }
  }

  // Rounds weights [rows, pitch], whose columns start at `column`. pool: planes of that size, all free.
  // Engine: vector unit.
  template <bool kHalf>
  __aicore__ inline void run(const LocalTensor<float>& weights, PlanePool* pool,
                             const REC_SDK_ISA::RowNumbers* numbers, int64_t rows, int64_t column) {
    count_ = static_cast<int32_t>(rows) * pitch_;
    for (int i = 0; i < kPlanes; ++i) planes_[i] = pool->plane(i).ReinterpretCast<int32_t>();
    draw(numbers, rows, static_cast<uint32_t>(column));
    const Ints bits = weights.ReinterpretCast<int32_t>();
    kHalf ? round_half(bits) : round_bfloat16(bits);
  }

 private:
  using Ints = LocalTensor<int32_t>;
  static constexpr int32_t kFirst = kUbBlock / 4;  // number of columns that the scalar unit writes

  __aicore__ inline void add(const Ints& to, const Ints& a, const Ints& b) const {
    AscendC::Add(to, a, b, count_);
    vector_barrier();
  }
  __aicore__ inline void add(const Ints& to, const Ints& a, int32_t b) const {
    AscendC::Adds(to, a, b, count_);
    vector_barrier();
  }
  __aicore__ inline void subtract(const Ints& to, const Ints& a, const Ints& b) const {
    AscendC::Sub(to, a, b, count_);
    vector_barrier();
  }
  __aicore__ inline void multiply(const Ints& to, const Ints& a, const Ints& b) const {
    AscendC::Mul(to, a, b, count_);
    vector_barrier();
  }
  // A logical shift, which fills the vacated bits with zeros.
  __aicore__ inline void shift_right(const Ints& to, const Ints& a, uint32_t by) const {
    AscendC::ShiftRight(to.ReinterpretCast<uint32_t>(), a.ReinterpretCast<uint32_t>(), by, count_);
    vector_barrier();
  }
  __aicore__ inline void shift_left(const Ints& to, const Ints& a, uint32_t by) const {
    AscendC::ShiftLeft(to.ReinterpretCast<uint32_t>(), a.ReinterpretCast<uint32_t>(), by, count_);
    vector_barrier();
  }
  // Writes -1 where a < bound, else 0.
  __aicore__ inline void mask_below(const Ints& to, const Ints& a, uint32_t bound) const {
    add(to, a, -static_cast<int32_t>(bound));
    AscendC::ShiftRight(to, to, 31, count_);  // int32_t, so that copies of the sign are shifted in
    vector_barrier();
  }
  // Sets `a` to b where the mask is -1; overwrites b.
  __aicore__ inline void choose(const Ints& a, const Ints& b, const Ints& mask) const {
    subtract(b, a, b);
    multiply(b, b, mask);
    add(a, a, b);
  }

  // Computes RowNumbers::at() of each column into plane 0.
  __aicore__ inline void draw(const REC_SDK_ISA::RowNumbers* numbers, int64_t rows, uint32_t column) {
    const Ints x = planes_[0], columns = columns_.Get<int32_t>();
    for (int64_t r = 0; r < rows; ++r) {
      const auto step = static_cast<int32_t>(numbers[r].step);
      AscendC::Muls(x[static_cast<uint32_t>(r * pitch_)], columns, step, pitch_);
    }
    vector_barrier();
    for (int64_t r = 0; r < rows; ++r) {
      const Ints row = x[static_cast<uint32_t>(r * pitch_)];
      AscendC::Adds(row, row, static_cast<int32_t>(numbers[r].at(column)), pitch_);
    }
    vector_barrier();
  }

  __aicore__ inline void magnitude_of(const Ints& to, const Ints& bits) const {
    shift_left(to, bits, 1);
    shift_right(to, to, 1);
  }

  __aicore__ inline void round_bfloat16(const Ints& bits) const {
    const Ints candidate = planes_[0], mask = planes_[1];
    shift_right(candidate, candidate, 16);
    magnitude_of(mask, bits);
    mask_below(mask, mask, REC_SDK_ISA::BFloat16::kLargest + 1);
    add(candidate, bits, candidate);
    shift_right(candidate, candidate, 16);
    shift_left(candidate, candidate, 16);
    choose(bits, candidate, mask);
  }

  __aicore__ inline void round_half(const Ints& bits) const {
    using REC_SDK_ISA::Float16;
    constexpr uint32_t kCut = 13;  // additional bits of float
    const Ints random = planes_[0], magnitude = planes_[1], candidate = planes_[2], subnormal = planes_[3];
    shift_right(random, random, 19);
    magnitude_of(magnitude, bits);
    subtract(bits, bits, magnitude);  // leaves the sign
    add(candidate, magnitude, random);
    shift_right(candidate, candidate, kCut);
    shift_left(candidate, candidate, kCut);

    const LocalTensor<float> units = subnormal.ReinterpretCast<float>();
    AscendC::Muls(units, magnitude.ReinterpretCast<float>(), Float16::kSubnormalUnits, count_);
    vector_barrier();
    AscendC::Cast(subnormal, units, AscendC::RoundMode::CAST_TRUNC, static_cast<uint32_t>(count_));
    vector_barrier();
    add(subnormal, subnormal, random);
    shift_right(subnormal, subnormal, kCut);
    AscendC::Cast(units, subnormal, AscendC::RoundMode::CAST_RINT, static_cast<uint32_t>(count_));
    vector_barrier();
    AscendC::Muls(units, units, 1.0f / (1 << 24), count_);
    vector_barrier();

    const Ints mask = random;
    mask_below(mask, magnitude, Float16::kSmallest);
    choose(candidate, subnormal, mask);
    mask_below(mask, magnitude, Float16::kLargest + 1);
    choose(magnitude, candidate, mask);
    add(bits, bits, magnitude);
  }

  Scratch columns_;  // 0, 1, 2, ...
  Ints planes_[kPlanes];
  int32_t pitch_, count_;
  Signal<HardEvent::S_V> indexed_;
};

}  // namespace ascendc
}  // namespace rec_sdk
