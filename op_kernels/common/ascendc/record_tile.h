// Records of a tile of rows, copied between GM and planes in UB: a plane of weights, a plane of each element
// state, a plane of gradients, and planes with one number per row for the row states. Padding in a record is
// neither read nor written.
#pragma once

#include "op_kernels/common/ascendc/bfloat16.h"
#include "op_kernels/common/ascendc/one_mask.h"
#include "op_kernels/common/ascendc/row_copies.h"
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

// Two sets of planes: one set is loaded while the rows of the other are updated and stored.
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
      if (shape.narrow) pipe->InitBuffer(narrow_[s], static_cast<uint32_t>(narrow_halves() * 2));
      clear(s);
    }
    if (Weights::kBytes == 2) pipe->InitBuffer(decoded_, static_cast<uint32_t>(plane_ * 4));
    if (converts()) arithmetic_.start();
  }
  __aicore__ inline void finish() {
    if (converts()) arithmetic_.finish();
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

  // Returns the loaded row state s, from which RowValues::take_state() gathers.
  __aicore__ inline LocalTensor<float> loaded_row_state(int set, int64_t s) {
    return plan_.joined ? joined_rows(set) : row_state(set, s);
  }
  // Copies each row's new state to the UB block after its weights, from which it is stored. Called after
  // encode(). Engine: vector unit.
  __aicore__ inline void join_row_state(int set, int64_t rows) {
    if (!plan_.joined) return;
    constexpr int64_t kBlock = kUbBlock / 4;
    const int64_t to_next = plan_.pitch * Weights::kBytes / kUbBlock;  // in blocks
    vector_barrier();
    OneMask::begin(rows * kBlock);
    OneMask::copy_strided(joined_rows(set)[static_cast<uint32_t>(shape_.dim * Weights::kBytes / 4)],
                          row_state(set, 0), static_cast<uint8_t>(to_next),
                          static_cast<uint8_t>(8 * to_next));
    OneMask::end();
    vector_barrier();
  }

  // Rows of a set, and the slots of their records, which are consecutive in UB.
  struct Rows {
    int set;
    int64_t first, count;
    LocalTensor<int32_t> slots;
  };

  // Loads the records of the rows. Engine: MTE2.
  __aicore__ inline void load_records(const Rows& rows, const TileColumns& columns) {
    if (Weights::kBytes == 2)
      load_halves(stored_[rows.set].template Get<uint16_t>(), rows, weight_block(columns));
    if (shape_.narrow) {
      if (Weights::kBytes == 4) load_blocks(plane(rows.set, 0), rows, elements(columns, 1));
      for (int64_t s = 0; s < states_of(columns); ++s) load_state(rows, s, columns);
      return;
    }
    if (float_blocks() > 0) load_blocks(plane(rows.set, 0), rows, elements(columns, float_blocks()));
    if (has_row_states(columns)) load_blocks(row_state(rows.set, 0), rows, row_blocks());
  }

  // Stores the records of the rows. Engine: MTE3.
  __aicore__ inline void store_records(const Rows& rows, const TileColumns& columns) {
    if (Weights::kBytes == 2)
      store_halves(stored_[rows.set].template Get<uint16_t>(), rows, weight_block(columns));
    if (shape_.narrow) {
      if (Weights::kBytes == 4) store_blocks(plane(rows.set, 0), rows, elements(columns, 1));
      for (int64_t s = 0; s < states_of(columns); ++s) store_state(rows, s, columns);
      return;
    }
    if (float_blocks() > 0) store_blocks(plane(rows.set, 0), rows, elements(columns, float_blocks()));
    if (has_row_states(columns)) store_blocks(row_state(rows.set, 0), rows, row_blocks());
  }

  // Converts 16-bit weights and states to floats, and back. Engine: vector unit.
  __aicore__ inline void decode(int set, int64_t rows, const TileColumns& columns) {
    if constexpr (Weights::kBytes == 2) {
      widen<typename Weights::Type>(weights(set), stored_[set], 0, rows * plan_.pitch);
    }
    for (int64_t s = 0; shape_.narrow && s < states_of(columns); ++s) {
      const int64_t count = rows * pitch_of(s), place = narrow_place(s);
      if (shape_.state_dtype[s] == DType::kFloat16) {
        widen<HalfWeights::Type>(state(set, s), narrow_[set], place, count);
      } else if (shape_.state_dtype[s] == DType::kBFloat16) {
        widen<BFloat16Weights::Type>(state(set, s), narrow_[set], place, count);
      }
    }
    if (converts()) vector_barrier();
  }
  __aicore__ inline void encode(int set, int64_t rows, const TileColumns& columns) {
    if constexpr (Weights::kBytes == 2) {
      round<typename Weights::Type>(stored_[set], 0, weights(set), rows * plan_.pitch);
    }
    for (int64_t s = 0; shape_.narrow && s < states_of(columns); ++s) {
      const int64_t count = rows * pitch_of(s), place = narrow_place(s);
      if (shape_.state_dtype[s] == DType::kFloat16) {
        round<HalfWeights::Type>(narrow_[set], place, state(set, s), count);
      } else if (shape_.state_dtype[s] == DType::kBFloat16) {
        round<BFloat16Weights::Type>(narrow_[set], place, state(set, s), count);
      }
    }
    if (converts()) vector_barrier();
  }

 private:
  template <class Type>
  __aicore__ inline void widen(const LocalTensor<float>& to, Landing& from, int64_t place, int64_t count) {
    AscendC::Cast(to, from.template Get<Type>()[static_cast<uint32_t>(place)], AscendC::RoundMode::CAST_NONE,
                  static_cast<uint32_t>(count));
  }
  template <class Type>
  __aicore__ inline void round(Landing& to, int64_t place, const LocalTensor<float>& from, int64_t count) {
    AscendC::Cast(to.template Get<Type>()[static_cast<uint32_t>(place)], from, AscendC::RoundMode::CAST_RINT,
                  static_cast<uint32_t>(count));
  }
  __aicore__ inline bool converts() const { return Weights::kBytes == 2 || shape_.narrow; }

  // Returns the rows of weights as loaded; the joined state of a row follows its weights.
  __aicore__ inline LocalTensor<float> joined_rows(int set) {
    return Weights::kBytes == 4 ? plane(set, 0) : stored_[set].template Get<float>();
  }
  __aicore__ inline int64_t row_plane() const { return plan_.rows * plan_.row_pitch; }
  // The planes of float weights and of element states come first in a set, then the plane of gradients.
  __aicore__ inline int64_t first_state() const { return Weights::kBytes == 4 ? 1 : 0; }
  __aicore__ inline int64_t float_blocks() const { return first_state() + shape_.element_states; }

  // ---- records with 16-bit states: each state is copied separately

  // Returns the number of element states, plus the row states with the first columns.
  __aicore__ inline int64_t states_of(const TileColumns& columns) const {
    return shape_.element_states + (columns.column == 0 ? shape_.row_states : 0);
  }
  __aicore__ inline bool of_row(int64_t s) const { return s >= shape_.element_states; }
  __aicore__ inline int64_t pitch_of(int64_t s) const { return of_row(s) ? plan_.row_pitch : plan_.pitch; }
  __aicore__ inline LocalTensor<float> state(int set, int64_t s) {
    return of_row(s) ? row_state(set, s - shape_.element_states) : element_state(set, s);
  }
  // Returns the position of a state among the 16-bit planes, which hold all states.
  __aicore__ inline int64_t narrow_place(int64_t s) const {
    return of_row(s) ? shape_.element_states * plane_ + (s - shape_.element_states) * row_plane()
                     : s * plane_;
  }
  __aicore__ inline int64_t narrow_halves() const {
    return narrow_place(shape_.element_states + shape_.row_states);
  }
  __aicore__ inline void load_state(const Rows& rows, int64_t s, const TileColumns& columns) {
    const OneBlock block = block_of(s, columns);
    if (shape_.state_dtype[s] == DType::kFloat32) {
      load_blocks(state(rows.set, s), rows, floats(block));
    } else {
      load_halves(narrow_state(rows.set, s), rows, block);
    }
  }
  __aicore__ inline void store_state(const Rows& rows, int64_t s, const TileColumns& columns) {
    const OneBlock block = block_of(s, columns);
    if (shape_.state_dtype[s] == DType::kFloat32) {
      store_blocks(state(rows.set, s), rows, floats(block));
    } else {
      store_halves(narrow_state(rows.set, s), rows, block);
    }
  }
  __aicore__ inline LocalTensor<uint16_t> narrow_state(int set, int64_t s) {
    return narrow_[set].template Get<uint16_t>()[static_cast<uint32_t>(narrow_place(s))];
  }

  // ---- copies
  __aicore__ inline LocalTensor<float> plane(int set, int64_t i) {
    return planes_[set].template Get<float>()[static_cast<uint32_t>(i * plane_)];
  }
  __aicore__ inline bool has_row_states(const TileColumns& columns) const {
    return shape_.row_states > 0 && columns.column == 0 && !plan_.joined;
  }

  // Clears the planes, because vector instructions also read the end of each row's pitch, which copies do not
  // write.
  __aicore__ inline void clear(int set) {
    const LocalTensor<float> planes = planes_[set].template Get<float>();
    AscendC::Duplicate(planes, 0.0f, static_cast<int32_t>((float_blocks() + 1) * plane_));
    if (Weights::kBytes == 2) {
      AscendC::Duplicate(stored_[set].template Get<uint16_t>(), static_cast<uint16_t>(0),
                         static_cast<int32_t>(plane_));
    }
    if (shape_.narrow) {
      AscendC::Duplicate(narrow_[set].template Get<uint16_t>(), static_cast<uint16_t>(0),
                         static_cast<int32_t>(narrow_halves()));
    }
  }

  // Blocks of floats in a record: the offset of the first block, the number of blocks, their pitches in the
  // record and in UB, and the size of one block. Offset, pitches and size are in bytes; row_pitch is the
  // number of floats between rows in UB.
  struct Blocks {
    int64_t offset, count, record_pitch, ub_pitch, bytes;
    int64_t row_pitch;
    __aicore__ inline uint32_t record_gap() const { return static_cast<uint32_t>(record_pitch - bytes); }
    __aicore__ inline uint32_t ub_gap() const {
      return static_cast<uint32_t>((ub_pitch - align_up(bytes, kUbBlock)) / kUbBlock);
    }
    __aicore__ inline int64_t span() const { return ((count - 1) * record_pitch + bytes) / 4; }
  };
  __aicore__ inline Blocks elements(const TileColumns& columns, int64_t count) const {
    const int64_t offset = Weights::kBytes == 4 ? 0 : shape_.element_states_offset;
    const int64_t width = columns.width + (plan_.joined ? 1 : 0);
    return {offset + columns.column * 4, count, shape_.dim * 4, plane_ * 4, width * 4, plan_.pitch};
  }
  __aicore__ inline Blocks row_blocks() const {
    return {shape_.row_states_offset, shape_.row_states, 4, row_plane() * 4, 4, plan_.row_pitch};
  }

  // One block of a record: its offset in bytes, its number of elements, and the number of elements between
  // rows in UB.
  struct OneBlock {
    int64_t offset, count, row_pitch;
  };
  __aicore__ inline OneBlock weight_block(const TileColumns& columns) const {
    const int64_t state = plan_.joined ? 4 / Weights::kBytes : 0;
    return {columns.column * Weights::kBytes, columns.width + state, plan_.pitch};
  }
  __aicore__ inline OneBlock block_of(int64_t s, const TileColumns& columns) const {
    if (of_row(s)) return {shape_.state_offset[s], 1, plan_.row_pitch};
    const int64_t bytes = dtype_bytes(shape_.state_dtype[s]);
    return {shape_.state_offset[s] + columns.column * bytes, columns.width, plan_.pitch};
  }
  __aicore__ inline static Blocks floats(const OneBlock& block) {
    const int64_t bytes = block.count * 4;
    return {block.offset, 1, bytes, align_up(bytes, kUbBlock), bytes, block.row_pitch};
  }

  // The loops over rows contain only the slot, the address and the copy, because the scalar unit limits their
  // speed. If a row is one block, neighbouring slots share a copy.
  __aicore__ inline void load_blocks(const LocalTensor<float>& to, const Rows& rows,
                                     const Blocks& blocks) const {
    LocalTensor<float> row = to[static_cast<uint32_t>(rows.first * blocks.row_pitch)];
    const int64_t padding = (align_up(blocks.bytes, kUbBlock) - blocks.bytes) / 4, pitch = shape_.bytes;
    if (blocks.count == 1) {
      const bool zeros = padding > 0 && !plan_.joined;  // the bytes after a joined state are not used
      const RowCopies<float, Direction::kFromTable> copies({records_ + blocks.offset, pitch},
                                                           blocks.bytes / 4, blocks.row_pitch, zeros);
      return copies.all(row, rows.slots, rows.count);
    }
    const AscendC::DataCopyExtParams copy{static_cast<uint16_t>(blocks.count),
                                          static_cast<uint32_t>(blocks.bytes), blocks.record_gap(),
                                          blocks.ub_gap(), 0};
    const AscendC::DataCopyPadExtParams<float> zeros{padding > 0, 0, static_cast<uint8_t>(padding), 0};
    const uint8_t* records = records_ + blocks.offset;
    const auto count = static_cast<uint32_t>(rows.count), step = static_cast<uint32_t>(blocks.row_pitch);
    for (uint32_t r = 0; r < count; ++r, row = row[step]) {
      const auto* from = reinterpret_cast<const float*>(records + rows.slots.GetValue(r) * pitch);
      AscendC::DataCopyPad(row, global(from, blocks.span()), copy, zeros);
    }
  }
  __aicore__ inline void store_blocks(const LocalTensor<float>& from, const Rows& rows,
                                      const Blocks& blocks) const {
    LocalTensor<float> row = from[static_cast<uint32_t>(rows.first * blocks.row_pitch)];
    const int64_t pitch = shape_.bytes;
    if (blocks.count == 1) {
      const RowCopies<float, Direction::kToTable> copies({records_ + blocks.offset, pitch}, blocks.bytes / 4,
                                                         blocks.row_pitch);
      return copies.all(row, rows.slots, rows.count);
    }
    const AscendC::DataCopyExtParams copy{static_cast<uint16_t>(blocks.count),
                                          static_cast<uint32_t>(blocks.bytes), blocks.ub_gap(),
                                          blocks.record_gap(), 0};
    const uint8_t* records = records_ + blocks.offset;
    const auto count = static_cast<uint32_t>(rows.count), step = static_cast<uint32_t>(blocks.row_pitch);
    for (uint32_t r = 0; r < count; ++r, row = row[step]) {
      const auto* to = reinterpret_cast<const float*>(records + rows.slots.GetValue(r) * pitch);
      AscendC::DataCopyPad(global(to, blocks.span()), row, copy);
    }
  }

  // Loads a block of 16-bit elements. The rest of a row's last UB block is widened too, so it is filled with
  // zeros. It is not filled after a joined state, because nothing reads it there.
  __aicore__ inline void load_halves(const LocalTensor<uint16_t>& to, const Rows& rows,
                                     const OneBlock& block) const {
    const RowCopies<uint16_t, Direction::kFromTable> copies({records_ + block.offset, shape_.bytes},
                                                            block.count, block.row_pitch, !plan_.joined);
    copies.all(to[static_cast<uint32_t>(rows.first * block.row_pitch)], rows.slots, rows.count);
  }
  __aicore__ inline void store_halves(const LocalTensor<uint16_t>& from, const Rows& rows,
                                      const OneBlock& block) const {
    const RowCopies<uint16_t, Direction::kToTable> copies({records_ + block.offset, shape_.bytes},
                                                          block.count, block.row_pitch);
    copies.all(from[static_cast<uint32_t>(rows.first * block.row_pitch)], rows.slots, rows.count);
  }

  RecordShape shape_;
  TilePlan plan_;
  uint8_t* records_;
  int64_t plane_;  // floats of a plane
  Landing planes_[2], stored_[2], row_states_[2], narrow_[2];
  Scratch decoded_;
  HostArithmetic arithmetic_;
};

}  // namespace ascendc
}  // namespace rec_sdk
