// Device side: copies rows between a table, at the rows given by slots, and a packed array, through UB and
// without vector instructions.
#pragma once

#include "op_kernels/common/ascendc/row_copies.h"
#include "op_kernels/common/ascendc/row_parts.h"
#include "op_kernels/common/ascendc/scalar_stream.h"

namespace rec_sdk {
namespace ascendc {

template <class Table>
struct MovedRows {
  Table table;
  const uint8_t* packed;  // [count, bytes]
  const int32_t* slots;   // [count]
  int64_t bytes;          // bytes of a row
  int64_t count;
};

// The slots of the rows of a packed array, read in order.
struct SlotStream {
  using Stream = ScalarStream<int32_t, 1024>;
  Stream stream;

  // Copies whole rows from `first` on between their slots and a tile.
  template <class Copies>
  __aicore__ inline void move(const Copies& copies, int64_t first, int64_t rows,
                              const LocalTensor<uint8_t>& tile, int64_t tile_pitch) {
    for (int64_t done = 0; done < rows;) {
      const auto slots = stream.run(first + done, rows - done);
      copies.all(tile[static_cast<uint32_t>(done * tile_pitch)], slots.values, slots.count);
      done += slots.count;
    }
  }
};

template <Direction kDirection, class Table = TableRows>
class RowMover {
 public:
  __aicore__ inline void run(TPipe* pipe, const MovedRows<Table>& rows) {
    rows_ = rows;
    parts_ = RowParts(rows.count, rows.bytes, kTileBytes, kSmallestPart, kUbBlock);
    const Share share = share_of_core(parts_.units());
    if (share.begin == share.end) return;
    pitch_ = align_up(parts_.longest(), kUbBlock);
    units_of_tile_ = tile_rows(kTileBytes / pitch_, share.end - share.begin);
    pipe->InitBuffer(tiles_, 2, static_cast<uint32_t>(units_of_tile_ * pitch_));
    slots_.stream.init(pipe);
    slots_.stream.start(rows_.slots, parts_.row(share.begin), parts_.row(share.end - 1) + 1);
    move(share);
    slots_.stream.release(pipe);
  }

 private:
  static constexpr int64_t kTileBytes = 64 * 1024, kSmallestPart = 4096;
  static_assert(kTileBytes / kUbBlock <= kMaxDmaBlocks, "a tile goes out in one copy");
  static_assert(2 * kTileBytes + SlotStream::Stream::kBytes <= kUbBytes, "UB");

  __aicore__ inline void move(const Share& share) {
    load_tile(share.begin, share.end);
    for (int64_t first = share.begin; first < share.end; first += units_of_tile_) {
      // The next tile is loaded first, because issuing a tile's stores one by one fills the queue of the
      // store engine, and the scalar unit then waits for it.
      if (first + units_of_tile_ < share.end) load_tile(first + units_of_tile_, share.end);
      store_tile(first, minimum(units_of_tile_, share.end - first));
    }
  }

  __aicore__ inline void load_tile(int64_t first, int64_t end) {
    const int64_t units = minimum(units_of_tile_, end - first);
    LocalTensor<uint8_t> tile = tiles_.template AllocTensor<uint8_t>();
    if (kDirection == Direction::kToTable && parts_.whole()) {
      load_rows(tile, rows_.packed + first * rows_.bytes, units, rows_.bytes, rows_.bytes, pitch_);
    } else if (parts_.whole()) {
      move_whole(first, units, tile);
    } else {
      for (int64_t u = 0; u < units; ++u) {
        const uint8_t* from = kDirection == Direction::kToTable ? in_packed(first + u) : in_table(first + u);
        load(tile[static_cast<uint32_t>(u * pitch_)], from, parts_.size(first + u));
      }
    }
    tiles_.EnQue(tile);
  }

  __aicore__ inline void store_tile(int64_t first, int64_t units) {
    LocalTensor<uint8_t> tile = tiles_.template DeQue<uint8_t>();
    if (kDirection == Direction::kFromTable && parts_.whole()) {
      store_rows(rows_.packed + first * rows_.bytes, tile, units, rows_.bytes, rows_.bytes, pitch_);
    } else if (parts_.whole()) {
      move_whole(first, units, tile);
    } else {
      for (int64_t u = 0; u < units; ++u) {
        const uint8_t* to = kDirection == Direction::kToTable ? in_table(first + u) : in_packed(first + u);
        store(to, tile[static_cast<uint32_t>(u * pitch_)], parts_.size(first + u));
      }
    }
    tiles_.FreeTensor(tile);
  }

  __aicore__ inline void move_whole(int64_t first, int64_t rows, const LocalTensor<uint8_t>& tile) {
    const RowCopies<uint8_t, kDirection, Table> copies(rows_.table, rows_.bytes, pitch_);
    slots_.move(copies, first, rows, tile, pitch_);
  }

  __aicore__ inline const uint8_t* in_table(int64_t unit) {
    return rows_.table.at(static_cast<uint32_t>(slots_.stream.at(parts_.row(unit)))) + parts_.offset(unit);
  }
  __aicore__ inline const uint8_t* in_packed(int64_t unit) const {
    return rows_.packed + parts_.row(unit) * rows_.bytes + parts_.offset(unit);
  }

  MovedRows<Table> rows_{};
  RowParts parts_;
  int64_t pitch_ = 0, units_of_tile_ = 0;
  AscendC::TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> tiles_;
  SlotStream slots_;
};

}  // namespace ascendc
}  // namespace rec_sdk
