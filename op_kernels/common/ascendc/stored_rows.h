// Device side: weights in their storage format, and as fp32.
#pragma once

#include "op_kernels/common/ascendc/bfloat16.h"
#include "op_kernels/common/ascendc/scalar_stream.h"

namespace rec_sdk {
namespace ascendc {

// Widths of rows in UB are multiples of this, so that rows of 16-bit and of fp32 values are whole UB blocks
// alike.
constexpr int64_t kWidthMultiple = kUbBlock / sizeof(uint16_t);

// The bits of a stored value as copies see them. Arch 2201 has no arithmetic on bfloat16_t.
template <class Stored>
struct StoredBits {
  using Type = uint16_t;
};
template <>
struct StoredBits<float> {
  using Type = float;
};

// Copies of the same part of rows: `count` values from `column` on. What they share is made once, since the
// scalar unit bounds the loops that use it.
template <class Stored>
class StoredPart {
 public:
  __aicore__ inline StoredPart(const Weights& weights, int64_t column, int64_t count)
      : from_(weights.data + column * static_cast<int64_t>(sizeof(Stored))),
        stride_(weights.stride_bytes),
        count_(count),
        copy_{1, static_cast<uint32_t>(count * sizeof(Stored)), 0, 0, 0},
        padding_{false, 0, 0, 0} {
    if (sizeof(Stored) == sizeof(float)) return;
    // Widened as a whole, so that the rest of the UB block must be defined.
    const int64_t rest = align_up(count, kUbBlock / sizeof(Stored)) - count;
    padding_ = {rest > 0, 0, static_cast<uint8_t>(rest), 0};
  }

  __aicore__ inline void load(const LocalTensor<Stored>& to, int32_t slot) const {
    const auto* row = reinterpret_cast<const Bits*>(from_ + slot * stride_);
    AscendC::DataCopyPad(to.template ReinterpretCast<Bits>(), global(row, count_), copy_, padding_);
  }

 private:
  using Bits = typename StoredBits<Stored>::Type;

  const uint8_t* from_;
  int64_t stride_, count_;
  AscendC::DataCopyExtParams copy_;
  AscendC::DataCopyPadExtParams<Bits> padding_;
};

// The same part of the rows of slots [first, first + rows) to a tile whose rows are `pitch` values apart.
template <class Stored, int64_t kSlots>
__aicore__ inline void load_rows_of_weights(const LocalTensor<Stored>& tile, int64_t pitch,
                                            const Weights& weights, ScalarStream<int32_t, kSlots>* slots,
                                            int64_t first, int64_t rows, int64_t column, int64_t count) {
  const StoredPart<Stored> part(weights, column, count);
  const auto to_next = static_cast<uint32_t>(pitch);
  uint32_t at = 0;
  for (int64_t done = 0; done < rows;) {
    const auto run = slots->run(first + done, rows - done);
    const auto end = static_cast<uint32_t>(run.count);
    for (uint32_t i = 0; i < end; ++i, at += to_next) part.load(tile[at], run.values.GetValue(i));
    done += run.count;
  }
}

// fp32 of `count` stored values, a vector instruction. Exact.
template <class Stored>
__aicore__ inline void widen(const LocalTensor<float>& to, const LocalTensor<Stored>& from, int64_t count) {
  AscendC::Cast(to, from, AscendC::RoundMode::CAST_NONE, static_cast<uint32_t>(count));
}

}  // namespace ascendc
}  // namespace rec_sdk
