#pragma once

#include "op_kernels/common/ascendc/move_rows.h"

namespace rec_sdk {
namespace ascendc {

// Swaps rows of the cache. The same core reads a slot and writes it, and the copy from the slot is complete
// before the copy to the slot is issued. No other synchronization orders the two.
class RowSwapper {
 public:
  __aicore__ inline void run(TPipe* pipe, const SwapRows& a) {
    a_ = a;
    parts_ = RowParts(a.count, a.bytes, kSideBytes, kSmallestPart, kUbBlock);
    const Share share = share_of_core(parts_.units());
    if (share.begin == share.end) return;
    pitch_ = align_up(parts_.longest(), kUbBlock);
    units_of_tile_ = parts_.whole() ? tile_rows(kSideBytes / pitch_, share.end - share.begin) : 1;
    pipe->InitBuffer(tiles_, 2, static_cast<uint32_t>(2 * units_of_tile_ * pitch_));
    const int64_t begin = parts_.row(share.begin), end = parts_.row(share.end - 1) + 1;
    left_slots_.stream.init(pipe);
    left_slots_.stream.start(a.slots, begin, end);
    victim_indices_.init(pipe);
    victim_indices_.start(a.victim_indices, begin, end);
    taken_slots_.stream.init(pipe);
    taken_slots_.stream.start(a.slots, begin, end);
    swap(share);
    left_slots_.stream.release(pipe);
    victim_indices_.release(pipe);
    taken_slots_.stream.release(pipe);
  }

 private:
  // A tile has two sides: the first holds the victims, the second the new rows.
  static constexpr int64_t kSideBytes = 32 * 1024, kSmallestPart = 4096;
  static_assert(kSideBytes / kUbBlock <= kMaxDmaBlocks, "a side goes through in one copy");
  static_assert(4 * kSideBytes + 3 * SlotStream::Stream::kBytes <= kUbBytes, "UB");

  // The victims of a tile, which are consecutive both in the tile and in the output `victims`.
  struct Victims {
    int64_t end;  // they go to rows [end - count, end) of `victims`
    int64_t count;
  };

  __aicore__ inline void swap(const Share& share) {
    Victims next = load_tile(share.begin, share.end);
    for (int64_t first = share.begin; first < share.end; first += units_of_tile_) {
      const Victims victims = next;
      if (first + units_of_tile_ < share.end) next = load_tile(first + units_of_tile_, share.end);
      store_tile(first, minimum(units_of_tile_, share.end - first), victims);
    }
  }

  __aicore__ inline Victims load_tile(int64_t first, int64_t end) {
    const int64_t units = minimum(units_of_tile_, end - first);
    LocalTensor<uint8_t> tile = tiles_.AllocTensor<uint8_t>();
    const Victims victims = parts_.whole() ? load_victims(first, units, tile) : load_part(first, tile);
    if (parts_.whole()) {
      load_rows(incoming(tile), a_.rows + first * a_.bytes, units, a_.bytes, a_.bytes, pitch_);
    } else {
      load(incoming(tile), a_.rows + in_row(parts_.row(first), first), parts_.size(first));
    }
    tiles_.EnQue(tile);
    return victims;
  }

  __aicore__ inline void store_tile(int64_t first, int64_t units, const Victims& victims) {
    LocalTensor<uint8_t> tile = tiles_.DeQue<uint8_t>();
    if (parts_.whole()) {
      if (victims.count > 0) {
        store_rows(a_.victims + (victims.end - victims.count) * a_.bytes, tile, victims.count, a_.bytes,
                   a_.bytes, pitch_);
      }
      const RowCopies<uint8_t, Direction::kToTable> copies(cache(), a_.bytes, pitch_);
      taken_slots_.move(copies, first, units, incoming(tile), pitch_);
    } else {
      const int64_t size = parts_.size(first);
      if (victims.count > 0) store(a_.victims + in_row(victims.end - 1, first), tile, size);
      store(a_.cache + in_row(taken_slots_.stream.at(parts_.row(first)), first), incoming(tile), size);
    }
    tiles_.FreeTensor(tile);
  }

  // Loads the victims. If no slot of a run is free, as in a full cache, the loop reads no `victim_indices`.
  __aicore__ inline Victims load_victims(int64_t first, int64_t rows, const LocalTensor<uint8_t>& tile) {
    const RowCopies<uint8_t, Direction::kFromTable> copies(cache(), a_.bytes, pitch_);
    Victims victims{0, 0};
    uint32_t at = 0;
    for (int64_t done = 0; done < rows;) {
      const auto slots = left_slots_.stream.run(first + done, rows - done);
      const auto victim_indices =
          victim_indices_.run(first + done, rows - done);  // the same number of elements as slots
      const auto count = static_cast<uint32_t>(slots.count);
      const int64_t from = victim_indices.values.GetValue(0), to = victim_indices.values.GetValue(count - 1);
      if (from >= 0 && to - from == slots.count - 1) {
        copies.all(tile[at], slots.values, slots.count);
        at += static_cast<uint32_t>(slots.count * pitch_);
        victims = {to + 1, victims.count + slots.count};
      } else {
        for (uint32_t i = 0; i < count; ++i) {
          const int32_t place = victim_indices.values.GetValue(i);
          if (place < 0) continue;
          copies.one(tile[at], slots.values.GetValue(i));
          victims = {place + 1, victims.count + 1};
          at += static_cast<uint32_t>(pitch_);
        }
      }
      done += slots.count;
    }
    return victims;
  }

  __aicore__ inline Victims load_part(int64_t unit, const LocalTensor<uint8_t>& tile) {
    const int64_t row = parts_.row(unit), place = victim_indices_.at(row);
    const int64_t slot =
        left_slots_.stream.at(row);  // read even if unused: the stream's chunks must all be consumed
    if (place < 0) return {0, 0};
    load(tile, a_.cache + in_row(slot, unit), parts_.size(unit));
    return {place + 1, 1};
  }

  __aicore__ inline TableRows cache() const { return {a_.cache, a_.bytes}; }
  __aicore__ inline int64_t in_row(int64_t row, int64_t unit) const {
    return row * a_.bytes + parts_.offset(unit);
  }
  __aicore__ inline LocalTensor<uint8_t> incoming(const LocalTensor<uint8_t>& tile) const {
    return tile[static_cast<uint32_t>(units_of_tile_ * pitch_)];
  }

  SwapRows a_{};
  RowParts parts_;
  int64_t pitch_ = 0, units_of_tile_ = 0;
  AscendC::TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> tiles_;
  // Two streams of the same slots: the load of the next tile reads its slots before the store of this tile
  // reads the slots of this tile.
  SlotStream left_slots_, taken_slots_;
  SlotStream::Stream victim_indices_;
};

__aicore__ inline void swap_rows(const SwapRows& a) {
  TPipe pipe;
  RowSwapper swapper;
  swapper.run(&pipe, a);
}

}  // namespace ascendc
}  // namespace rec_sdk
