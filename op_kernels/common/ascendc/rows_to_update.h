// The rows of an update, as passed to its tiles.
#pragma once

#include "op_kernels/common/ascendc/hot_rows.h"
#include "op_kernels/common/ascendc/tile_plan.h"

namespace rec_sdk {
namespace ascendc {

// The coefficients of the tables that share a launch. If `offsets` is null, there is one table. If
// `coefficients` is null, the optimizer has none, and gradients are not clipped.
struct TablesOfRows {
  const int32_t* offsets;  // [count + 1]
  int64_t count;
  const float* coefficients;  // [count, kCoefficients]
};

// The parameters of stochastic rounding. Without them, weights are rounded to nearest.
struct RoundingOfRows {
  const int64_t* ids;    // [rows]
  const int64_t* seeds;  // [tables]
};

struct RowsToUpdate {
  Segments segments;
  uint8_t* records;
  RecordShape shape;
  TablesOfRows tables;
  HotWorkspace workspace;
  RoundingOfRows rounding;
  float* norms;  // [RowNorms::kNorms, rows], or null if they are not requested
};

}  // namespace ascendc
}  // namespace rec_sdk
