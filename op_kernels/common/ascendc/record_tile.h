// Records of a tile of rows, between GM and planes in UB: a plane of weights, one of each element state, one
// of the gradients, and planes of one number a row for the row states. Padding in a record is neither read
// nor written.
#pragma once

#include "op_kernels/common/ascendc/bfloat16.h"
#include "op_kernels/common/ascendc/saturation.h"
#include "op_kernels/common/ascendc/tile_plan.h"

namespace rec_sdk {
namespace ascendc {

struct FloatWeights {
  static constexpr int64_t kBytes = 4;
  static constexpr bool kRounds = false, kHalf = false;
};
struct HalfWeights {
  static constexpr int64_t kBytes = 2;
  static constexpr bool kRounds = true, kHalf = true;
  using Type = half;
};
struct BFloat16Weights {
  static constexpr int64_t kBytes = 2;
  static constexpr bool kRounds = true, kHalf = false;
  using Type = BFloat16;
};

// Two sets of planes: one is loaded while the other is computed and stored.
template <class Weights>
class RecordTiles {
 public:
  __aicore__ inline void init(TPipe* pipe, const RecordShape& shape, const TilePlan& plan, uint8_t* records) {
    shape_ = shape;
    plan_ = plan;
    records_ = records;
    plane_ = plan.rows * plan.pitch;
    const int64_t planes = shape.element_states + 1 + (Weights::kBytes == 4 ? 1 : 0);
    for (int s = 0; s < 2; ++s) {
      pipe->InitBuffer(planes_[s], static_cast<uint32_t>(planes * plane_ * 4));
      if (Weights::kBytes == 2) pipe->InitBuffer(stored_[s], static_cast<uint32_t>(plane_ * 2));
      if (shape.row_states > 0) {
        pipe->InitBuffer(row_states_[s], static_cast<uint32_t>(shape.row_states * row_plane() * 4));
      }
      clear(s);
    }
    if constexpr (Weights::kBytes == 2) {
      pipe->InitBuffer(decoded_, static_cast<uint32_t>(plane_ * 4));
      conversions_.start();
    }
  }
  __aicore__ inline void finish() {
    if constexpr (Weights::kBytes == 2) conversions_.finish();
  }

  __aicore__ inline LocalTensor<float> weights(int set) {
    return Weights::kBytes == 4 ? plane(set, 0) : decoded_.template Get<float>();
  }
  __aicore__ inline LocalTensor<float> element_state(int set, int64_t s) {
    return plane(set, first_state() + s);
  }
  __aicore__ inline LocalTensor<float> gradients(int set) {
    return plane(set, first_state() + shape_.element_states);
  }
  __aicore__ inline LocalTensor<float> row_state(int set, int64_t s) {
    return row_states_[set].template Get<float>()[static_cast<uint32_t>(s * row_plane())];
  }

  // Rows of a set, and the slots of their records, which lie side by side in UB.
  struct Rows {
    int set;
    int64_t first, count;
    LocalTensor<int32_t> slots;
  };

  // From the records. MTE2.
  __aicore__ inline void load_records(const Rows& rows, const TileColumns& columns) {
    if (Weights::kBytes == 2) load_weights(rows, columns);
    if (float_blocks() > 0) load_blocks(plane(rows.set, 0), rows, elements(columns));
    if (has_row_states(columns)) load_blocks(row_state(rows.set, 0), rows, row_blocks());
  }

  // The reverse. MTE3.
  __aicore__ inline void store_records(const Rows& rows, const TileColumns& columns) {
    if (Weights::kBytes == 2) store_weights(rows, columns);
    if (float_blocks() > 0) store_blocks(plane(rows.set, 0), rows, elements(columns));
    if (has_row_states(columns)) store_blocks(row_state(rows.set, 0), rows, row_blocks());
  }

  // 16-bit weights to floats and back. V.
  __aicore__ inline void decode(int set, int64_t rows) {
    if constexpr (Weights::kBytes == 2) {
      using Type = typename Weights::Type;
      AscendC::Cast(weights(set), stored_[set].template Get<Type>(), AscendC::RoundMode::CAST_NONE,
                    static_cast<uint32_t>(rows * plan_.pitch));
      vector_barrier();
    }
  }
  __aicore__ inline void encode(int set, int64_t rows) {
    if constexpr (Weights::kBytes == 2) {
      using Type = typename Weights::Type;
      AscendC::Cast(stored_[set].template Get<Type>(), weights(set), AscendC::RoundMode::CAST_RINT,
                    static_cast<uint32_t>(rows * plan_.pitch));
      vector_barrier();
    }
  }

 private:
  __aicore__ inline int64_t row_plane() const { return plan_.rows * kRowPlanePitch; }
  // The planes of a set that are floats in the record come first, and then the gradients.
  __aicore__ inline int64_t first_state() const { return Weights::kBytes == 4 ? 1 : 0; }
  __aicore__ inline int64_t float_blocks() const { return first_state() + shape_.element_states; }
  __aicore__ inline LocalTensor<float> plane(int set, int64_t i) {
    return planes_[set].template Get<float>()[static_cast<uint32_t>(i * plane_)];
  }
  __aicore__ inline bool has_row_states(const TileColumns& columns) const {
    return shape_.row_states > 0 && columns.column == 0;
  }

  // Copies leave what follows a narrow row alone, but vector instructions run over it.
  __aicore__ inline void clear(int set) {
    const LocalTensor<float> planes = planes_[set].template Get<float>();
    AscendC::Duplicate(planes, 0.0f, static_cast<int32_t>((float_blocks() + 1) * plane_));
    if (Weights::kBytes == 2) {
      AscendC::Duplicate(stored_[set].template Get<uint16_t>(), static_cast<uint16_t>(0),
                         static_cast<int32_t>(plane_));
    }
  }

  // Blocks of a record that are floats: where they begin in it, the pitch of one in the record and in UB, its
  // size, all in bytes, and the floats from one row of theirs to the next in UB.
  struct Blocks {
    int64_t offset, count, record_pitch, ub_pitch, bytes;
    int64_t row_pitch;
    __aicore__ inline uint32_t record_gap() const { return static_cast<uint32_t>(record_pitch - bytes); }
    __aicore__ inline uint32_t ub_gap() const {
      return static_cast<uint32_t>((ub_pitch - align_up(bytes, kUbBlock)) / kUbBlock);
    }
    __aicore__ inline int64_t span() const { return ((count - 1) * record_pitch + bytes) / 4; }
  };
  __aicore__ inline Blocks elements(const TileColumns& columns) const {
    const int64_t offset = Weights::kBytes == 4 ? 0 : shape_.element_states_offset;
    return {offset + columns.column * 4, float_blocks(), shape_.dim * 4, plane_ * 4,
            columns.width * 4,           plan_.pitch};
  }
  __aicore__ inline Blocks row_blocks() const {
    return {shape_.row_states_offset, shape_.row_states, 4, row_plane() * 4, 4, kRowPlanePitch};
  }

  // The loops over rows hold nothing but the slot, the address and the copy: the scalar unit bounds them.
  __aicore__ inline void load_blocks(const LocalTensor<float>& to, const Rows& rows,
                                     const Blocks& blocks) const {
    const AscendC::DataCopyExtParams copy{static_cast<uint16_t>(blocks.count),
                                          static_cast<uint32_t>(blocks.bytes), blocks.record_gap(),
                                          blocks.ub_gap(), 0};
    const int64_t padding = (align_up(blocks.bytes, kUbBlock) - blocks.bytes) / 4, pitch = shape_.bytes;
    const AscendC::DataCopyPadExtParams<float> zeros{padding > 0, 0, static_cast<uint8_t>(padding), 0};
    const uint8_t* records = records_ + blocks.offset;
    const auto count = static_cast<uint32_t>(rows.count), step = static_cast<uint32_t>(blocks.row_pitch);
    uint32_t at = static_cast<uint32_t>(rows.first) * step;
    for (uint32_t r = 0; r < count; ++r, at += step) {
      const auto* from = reinterpret_cast<const float*>(records + rows.slots.GetValue(r) * pitch);
      AscendC::DataCopyPad(to[at], global(from, blocks.span()), copy, zeros);
    }
  }
  __aicore__ inline void store_blocks(const LocalTensor<float>& from, const Rows& rows,
                                      const Blocks& blocks) const {
    const AscendC::DataCopyExtParams copy{static_cast<uint16_t>(blocks.count),
                                          static_cast<uint32_t>(blocks.bytes), blocks.ub_gap(),
                                          blocks.record_gap(), 0};
    const int64_t pitch = shape_.bytes;
    const uint8_t* records = records_ + blocks.offset;
    const auto count = static_cast<uint32_t>(rows.count), step = static_cast<uint32_t>(blocks.row_pitch);
    uint32_t at = static_cast<uint32_t>(rows.first) * step;
    for (uint32_t r = 0; r < count; ++r, at += step) {
      const auto* to = reinterpret_cast<const float*>(records + rows.slots.GetValue(r) * pitch);
      AscendC::DataCopyPad(global(to, blocks.span()), from[at], copy);
    }
  }

  // 16-bit weights.
  __aicore__ inline void load_weights(const Rows& rows, const TileColumns& columns) {
    const LocalTensor<uint16_t> to = stored_[rows.set].template Get<uint16_t>();
    const uint8_t* records = records_ + columns.column * 2;
    const int64_t pitch = shape_.bytes;
    const auto count = static_cast<uint32_t>(rows.count), step = static_cast<uint32_t>(plan_.pitch);
    uint32_t at = static_cast<uint32_t>(rows.first) * step;
    for (uint32_t r = 0; r < count; ++r, at += step) {
      load_padded(to[at], reinterpret_cast<const uint16_t*>(records + rows.slots.GetValue(r) * pitch),
                  columns.width);
    }
  }
  __aicore__ inline void store_weights(const Rows& rows, const TileColumns& columns) {
    const LocalTensor<uint16_t> from = stored_[rows.set].template Get<uint16_t>();
    const uint8_t* records = records_ + columns.column * 2;
    const int64_t pitch = shape_.bytes;
    const auto count = static_cast<uint32_t>(rows.count), step = static_cast<uint32_t>(plan_.pitch);
    uint32_t at = static_cast<uint32_t>(rows.first) * step;
    for (uint32_t r = 0; r < count; ++r, at += step) {
      store(reinterpret_cast<const uint16_t*>(records + rows.slots.GetValue(r) * pitch), from[at],
            columns.width);
    }
  }

  RecordShape shape_;
  TilePlan plan_;
  uint8_t* records_;
  int64_t plane_;  // floats
  Scratch planes_[2], stored_[2], row_states_[2], decoded_;
  IeeeConversions conversions_;
};

}  // namespace ascendc
}  // namespace rec_sdk
