// The rows of an update as its tiles are given them.
#pragma once

#include "op_kernels/common/ascendc/hot_rows.h"
#include "op_kernels/common/ascendc/tile_plan.h"

namespace rec_sdk {
namespace ascendc {

// Tables share a launch, but not their coefficients. Null offsets: one table; null coefficients: none, no
// clipping.
struct TablesOfRows {
  const int32_t* offsets;  // [count + 1]
  int64_t count;
  const float* coefficients;  // [count, kCoefficients]
};

// Weights are rounded by these; null: to nearest.
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
  float* norms;  // [RowNorms::kNorms, rows], or null: not counted
};

}  // namespace ascendc
}  // namespace rec_sdk
