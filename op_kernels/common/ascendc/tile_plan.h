// The division of UB among the rows of records, their gradients and the temporaries of an update.
#pragma once

#include "op_kernels/common/ascendc/gradient_sums.h"
#include "op_kernels/common/ascendc/lane_sums.h"
#include "op_kernels/common/ascendc/planes.h"

namespace rec_sdk {
namespace ascendc {

// The records of one kernel. Element states follow the weights, and row states follow the element states.
struct RecordShape {
  int64_t dim;
  int64_t bytes;         // bytes between the starts of records
  int64_t weight_bytes;  // bytes of an element: 4 or 2
  int64_t element_states, row_states;
  int64_t element_states_offset = 0, row_states_offset = 0;  // in bytes from the start of the record
  bool narrow = false;  // whether a state has 16 bits; the next two members are valid only then
  int64_t state_offset[kMaxStates] = {};
  DType state_dtype[kMaxStates] = {};
};

// A tile has `rows` rows and `width` columns. The rows of planes are `pitch` floats apart, the rows of planes
// with one number per row `row_pitch` floats.
struct TilePlan {
  int64_t rows, width, pitch, row_pitch;
  int64_t levels;  // levels of the stack of GradientSums
  // Whether a row state is copied together with the weights. It follows them in the record, and is loaded to
  // the UB block after them.
  bool joined = false;
};

constexpr int64_t kHalvesOfBlock = kUbBlock / 2;
constexpr int64_t kSpreadIndex = 1024;  // numbers of a row value that one instruction broadcasts
constexpr int64_t kMaxTileRows = 128;

// Returns the pitch, in numbers, of planes with one number per row. Each number has its own UB block. With
// 16-bit states a block holds 16 numbers, which become floats in two blocks.
__aicore__ inline constexpr int64_t row_plane_pitch(const RecordShape& shape) {
  return shape.narrow ? kHalvesOfBlock : kUbBlock / 4;
}

// Returns the bytes of a tile: two sets of weights, states and gradients, then memory used only by vector
// instructions, with `planes` planes of intermediate results.
__aicore__ inline constexpr int64_t tile_bytes(const RecordShape& shape, int planes, int64_t rows,
                                               int64_t pitch) {
  const int64_t narrow =
      shape.narrow ? 2 : 0;  // 16-bit bytes in addition to its floats, per element of a state
  const int64_t set = shape.weight_bytes + 4 + (4 + narrow) * shape.element_states;
  const int64_t decoded = shape.weight_bytes == 4 ? 0 : 4;
  const int64_t row_states = 2 * shape.row_states * row_plane_pitch(shape) * (4 + narrow);
  return rows * (pitch * (2 * set + decoded + 4 * planes) + row_states);
}

// The numbers that an optimizer needs per row: the sums of one pass, and the vectors with one number per row.
struct RowNeeds {
  int64_t sums, vectors;
};

// Returns the bytes of RowValues for these rows: the lanes of the sums, vectors with one number per row,
// including the row states and their index, and the indices that broadcast them.
__aicore__ inline constexpr int64_t row_value_bytes(const RecordShape& shape, RowNeeds needs, int64_t rows,
                                                    int64_t pitch) {
  const int64_t of_row = LaneSums::floats_of_row(needs.sums) + needs.vectors + 1 + shape.row_states;
  return 4 * (align_up(rows, kUbBlock / 4) * of_row + maximum(kSpreadIndex, pitch) + kSpreadIndex);
}

// The UB that is used in addition to the records and gradients of a tile. `planes`: number of planes of
// intermediate results, each as large as the tile. `shared`: 4-byte numbers per column, shared by all rows.
// `bytes`: the same for every tile, for the index windows. `row_floats`: per row, with the number of rows
// rounded up to whole UB blocks.
struct BesideTile {
  int planes;
  int64_t shared, bytes, row_floats = 0;

  __aicore__ inline constexpr int64_t bytes_of_rows(int64_t rows) const {
    return 4 * row_floats * align_up(rows, kUbBlock / 4);
  }
};

// Returns the row pitch of a tile with `width` columns: whole UB blocks of weights and of states.
__aicore__ inline constexpr int64_t tile_pitch(const RecordShape& shape, RowNeeds needs, int64_t width) {
  const int64_t unit = shape.narrow ? kHalvesOfBlock : kUbBlock / shape.weight_bytes;
  const int64_t pitch = align_up(width, unit);
  return needs.sums > 0 ? spread_pitch(pitch, unit) : pitch;
}

// Returns the bytes of the smallest tile, which has one row and as many columns as there are lanes.
// UpdateTiles does not compile for an optimizer whose smallest tile does not fit, so a plan always exists.
__aicore__ inline constexpr int64_t narrowest_tile_bytes(const RecordShape& shape, RowNeeds needs,
                                                         const BesideTile& beside, int64_t lookups) {
  const int64_t pitch = tile_pitch(shape, needs, kLanes);
  const int64_t of_rows = needs.sums > 0 ? row_value_bytes(shape, needs, 1, pitch) : 0;
  return beside.bytes + sum_bytes(pitch, sum_levels(lookups)) + 4 * beside.shared * pitch +
         tile_bytes(shape, beside.planes, 1, pitch) + of_rows + beside.bytes_of_rows(1);
}

__aicore__ inline constexpr bool joins_row_state(const RecordShape& shape, int64_t width, int64_t pitch) {
  constexpr int64_t kRows = 8, kFarthest = UINT8_MAX;  // blocks between rows that are 8 apart
  const int64_t bytes = shape.dim * shape.weight_bytes;
  return shape.row_states == 1 && shape.element_states == 0 && !shape.narrow &&
         shape.row_states_offset == bytes && bytes % kUbBlock == 0 && width == shape.dim && pitch > width &&
         kRows * pitch * shape.weight_bytes / kUbBlock <= kFarthest;
}

// Plans the widest tile that fits, and then as many rows as fit.
__aicore__ inline TilePlan plan_tiles(const RecordShape& shape, RowNeeds needs, const BesideTile& beside,
                                      int64_t lookups, int64_t rows_of_core) {
  TilePlan plan{1, 0, 0, row_plane_pitch(shape), sum_levels(lookups)};
  const int planes = beside.planes;
  for (int64_t tiles = 1;; ++tiles) {
    // If a row needs several tiles, the width is a multiple of the lanes.
    plan.width = tiles == 1 ? shape.dim : align_up(ceil_div(shape.dim, tiles), kLanes);
    plan.pitch = tile_pitch(shape, needs, plan.width);
    const int64_t left =
        kUbBytes - beside.bytes - sum_bytes(plan.pitch, plan.levels) - 4 * beside.shared * plan.pitch;
    int64_t fit = minimum(left / tile_bytes(shape, planes, 1, plan.pitch), kMaxTileRows);
    while (fit > 0 && left < tile_bytes(shape, planes, fit, plan.pitch) + beside.bytes_of_rows(fit) +
                                 (needs.sums > 0 ? row_value_bytes(shape, needs, fit, plan.pitch) : 0)) {
      --fit;
    }
    if (fit <= 0) continue;  // the narrowest tile fits
    plan.rows = tile_rows(fit, rows_of_core);
    plan.joined = joins_row_state(shape, plan.width, plan.pitch);
    return plan;
  }
}

}  // namespace ascendc
}  // namespace rec_sdk
