// Device side: copies between the rows of a table given by slots, and the rows of a tile.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

enum class Direction { kFromTable, kToTable };

struct TableRows {
  const uint8_t* data;  // row s starts at data + s * pitch
  int64_t pitch;        // in bytes

  __aicore__ inline const uint8_t* at(uint32_t slot) const {
    return data + static_cast<int64_t>(slot) * pitch;
  }
  __aicore__ inline constexpr bool together(uint32_t, uint32_t) const { return true; }
};

// A table and a staging buffer. Row i of the staging buffer has the slot number `slots + i`.
class TableAndStaging {
 public:
  TableAndStaging() = default;
  __aicore__ inline TableAndStaging(const TableRows& table, int64_t slots, const uint8_t* staging)
      : pitch(table.pitch),
        table_(reinterpret_cast<uint64_t>(table.data)),
        behind_(reinterpret_cast<uint64_t>(staging) - static_cast<uint64_t>(slots * table.pitch)),
        slots_(static_cast<uint32_t>(slots)) {}

  __aicore__ inline const uint8_t* at(uint32_t slot) const {
    const uint64_t base = slot < slots_ ? table_ : behind_;
    return reinterpret_cast<const uint8_t*>(base +
                                            static_cast<uint64_t>(slot) * static_cast<uint64_t>(pitch));
  }
  // Returns whether both rows are in the table or both in the staging buffer. Only then can one copy span
  // them.
  __aicore__ inline bool together(uint32_t first, uint32_t second) const {
    return (first < slots_) == (second < slots_);
  }

  int64_t pitch = 0;

 private:
  uint64_t table_ = 0, behind_ = 0;
  uint32_t slots_ = 0;
};

// Copies `count` values of each row. The start of a copy takes as long as copying hundreds of bytes. So if
// the second row of a pair follows the first in the table, one copy moves both as two blocks, and skips the
// rows between them as a gap. The scalar unit limits the speed of these loops, so values that all copies
// share are computed once.
template <class T, Direction kDirection, class Table = TableRows>
class RowCopies {
 public:
  // tile_pitch: values between the starts of rows in the tile, whole UB blocks. zeros: fill with zeros up to
  // the end of a row's last UB block when copying from the table.
  __aicore__ inline RowCopies(const Table& table, int64_t count, int64_t tile_pitch, bool zeros = false)
      : table_(table), count_(count), step_(static_cast<uint32_t>(tile_pitch)), padding_{false, 0, 0, 0} {
    const auto bytes = static_cast<uint32_t>(count * sizeof(T));
    one_ = {1, bytes, 0, 0, 0};
    const int64_t rest = align_up(bytes, kUbBlock) - bytes;
    if (zeros && rest > 0) padding_ = {true, 0, static_cast<uint8_t>(rest / sizeof(T)), 0};
    tile_gap_ = static_cast<uint32_t>((tile_pitch * sizeof(T) - align_up(bytes, kUbBlock)) / kUbBlock);
    gap_ = static_cast<uint32_t>(table.pitch) - bytes;
    farthest_ = static_cast<uint32_t>(minimum<int64_t>(INT32_MAX, quotient(kMaxGap + bytes, table.pitch)));
  }

  __aicore__ inline void one(const LocalTensor<T>& row, uint32_t slot) const {
    copy(row, slot, count_, one_, padding_);
  }

  // Copies the first `rows` of `slots`, at least one, to or from `tile`.
  __aicore__ inline void all(const LocalTensor<T>& tile, const LocalTensor<int32_t>& slots,
                             int64_t rows) const {
    const Padding none{false, 0, 0, 0};  // a constant, so that the loop does not test the padding of each row
    if (padding_.isPad) {
      copy_all(tile, slots, rows, padding_);
    } else {
      copy_all(tile, slots, rows, none);
    }
  }

 private:
  using Padding = AscendC::DataCopyPadExtParams<T>;

  __aicore__ inline void copy_all(const LocalTensor<T>& tile, const LocalTensor<int32_t>& slots, int64_t rows,
                                  const Padding& padding) const {
    LocalTensor<T> row = tile;
    LocalTensor<int32_t> slot = slots;
    for (auto pairs = static_cast<uint32_t>(rows / 2); pairs > 0; --pairs) {
      const uint32_t first = slot.GetValue(0), second = slot.GetValue(1);
      const uint32_t between =
          second - first - 1;  // wraps to 2^31 and more if the second is at or before the first
      if (between < farthest_ && table_.together(first, second)) {
        both(row, first, between, padding);
      } else {
        copy(row, first, count_, one_, padding);
        copy(row[step_], second, count_, one_, padding);
      }
      slot = slot[2];
      row = row[2 * step_];
    }
    if (rows % 2 != 0) copy(row, slot.GetValue(0), count_, one_, padding);
  }

  __aicore__ inline void both(const LocalTensor<T>& rows, uint32_t slot, uint32_t between,
                              const Padding& padding) const {
    const uint32_t gap = between * static_cast<uint32_t>(table_.pitch) + gap_;
    const int64_t span = 2 * count_ + gap / sizeof(T);
    if (kDirection == Direction::kFromTable) {
      copy(rows, slot, span, {2, one_.blockLen, gap, tile_gap_, 0}, padding);
    } else {
      copy(rows, slot, span, {2, one_.blockLen, tile_gap_, gap, 0}, padding);
    }
  }

  // span: values of the table from the first copied value to the last.
  __aicore__ inline void copy(const LocalTensor<T>& rows, uint32_t slot, int64_t span,
                              const AscendC::DataCopyExtParams& params, const Padding& padding) const {
    const auto* row = reinterpret_cast<const T*>(table_.at(slot));
    if constexpr (kDirection == Direction::kFromTable) {
      AscendC::DataCopyPad(rows, global(row, span), params, padding);
    } else {
      AscendC::DataCopyPad(global(row, span), rows, params);
    }
  }

  Table table_;
  int64_t count_;
  uint32_t step_, tile_gap_, farthest_;
  uint32_t gap_;  // in bytes, between neighbours
  AscendC::DataCopyExtParams one_;
  Padding padding_;
};

}  // namespace ascendc
}  // namespace rec_sdk
