// Device side: weights in their storage format, and as fp32.
#pragma once

#include "op_kernels/common/ascendc/bfloat16.h"
#include "op_kernels/common/ascendc/row_copies.h"
#include "op_kernels/common/ascendc/scalar_stream.h"

namespace rec_sdk {
namespace ascendc {

// Widths of rows in UB are multiples of this, so that rows of 16-bit and of fp32 values are both whole UB
// blocks.
constexpr int64_t kWidthMultiple = kUbBlock / sizeof(uint16_t);

// The type with which copies move stored values. Arch 2201 has no arithmetic on bfloat16_t.
template <class Stored>
struct StoredBits {
  using Type = uint16_t;
};
template <>
struct StoredBits<float> {
  using Type = float;
};

// The weights of a cache and of a staging buffer with the same record format. Slot numbers from `rows` on are
// rows of the staging buffer.
struct StagedWeights : Weights {
  const uint8_t* staging;
};

// Returns the rows from byte `begin` of each record on.
__aicore__ inline TableRows table_of(const Weights& weights, int64_t begin) {
  return {weights.data + begin, weights.stride_bytes};
}
__aicore__ inline TableAndStaging table_of(const StagedWeights& weights, int64_t begin) {
  return {table_of(static_cast<const Weights&>(weights), begin), weights.rows, weights.staging + begin};
}

template <class Source>
using TableOf = decltype(table_of(Source{}, 0));

// Loads the rows of slots [first, first + rows) to a tile whose rows are `pitch` values apart.
template <class Stored, class Source, int64_t kSlots>
__aicore__ inline void load_rows_of_weights(const LocalTensor<Stored>& tile, int64_t pitch,
                                            const Source& weights, ScalarStream<int32_t, kSlots>* slots,
                                            int64_t first, int64_t rows, int64_t column, int64_t count) {
  using Bits = typename StoredBits<Stored>::Type;
  const auto table = table_of(weights, column * static_cast<int64_t>(sizeof(Stored)));
  // Whole UB blocks are widened, so the rest of a row's last block must be defined.
  const RowCopies<Bits, Direction::kFromTable, TableOf<Source>> copies(table, count, pitch,
                                                                       sizeof(Stored) < sizeof(float));
  const LocalTensor<Bits> bits = tile.template ReinterpretCast<Bits>();
  for (int64_t done = 0; done < rows;) {
    const auto run = slots->run(first + done, rows - done);
    copies.all(bits[static_cast<uint32_t>(done * pitch)], run.values, run.count);
    done += run.count;
  }
}

// Converts `count` stored values to fp32, exactly, with one vector instruction.
template <class Stored>
__aicore__ inline void widen(const LocalTensor<float>& to, const LocalTensor<Stored>& from, int64_t count) {
  AscendC::Cast(to, from, AscendC::RoundMode::CAST_NONE, static_cast<uint32_t>(count));
}

}  // namespace ascendc
}  // namespace rec_sdk
