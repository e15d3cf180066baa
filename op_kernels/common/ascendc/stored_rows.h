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

// Part of a row: `count` values of it from `column` on.
template <class Stored>
__aicore__ inline void load_weights(const LocalTensor<Stored>& to, const Weights& weights, int32_t slot,
                                    int64_t column, int64_t count) {
  using Bits = typename StoredBits<Stored>::Type;
  const uint8_t* row = weights.data + slot * weights.stride_bytes;
  const Bits* from = reinterpret_cast<const Bits*>(row) + column;
  if (sizeof(Stored) == sizeof(float)) {
    load(to.template ReinterpretCast<Bits>(), from, count);
  } else {  // widened as a whole, so that its padding must be defined
    load_padded(to.template ReinterpretCast<Bits>(), from, count);
  }
}

// The same part of the rows of slots [first, first + rows) to a tile whose rows are `pitch` values apart. The
// scalar unit bounds this loop, so that it holds nothing but the slot, the address and the copy.
template <class Stored, int64_t kSlots>
__aicore__ inline void load_rows_of_weights(const LocalTensor<Stored>& tile, int64_t pitch,
                                            const Weights& weights, ScalarStream<int32_t, kSlots>* slots,
                                            int64_t first, int64_t rows, int64_t column, int64_t count) {
  Weights part = weights;
  part.data += column * static_cast<int64_t>(sizeof(Stored));
  const auto to_next = static_cast<uint32_t>(pitch);
  uint32_t at = 0;
  for (int64_t done = 0; done < rows;) {
    const auto run = slots->run(first + done, rows - done);
    for (uint32_t i = 0; i < static_cast<uint32_t>(run.count); ++i, at += to_next) {
      load_weights(tile[at], part, run.values.GetValue(i), 0, count);
    }
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
