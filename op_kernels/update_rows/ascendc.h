// update_rows for arch 2201. README.md describes how the work is divided.
#pragma once

#include "op_kernels/common/ascendc/chunk_sums.h"
#include "op_kernels/common/ascendc/update_tiles.h"

namespace rec_sdk {
namespace ascendc {

__aicore__ inline void sum_chunks(TPipe* pipe, const Segments& segments, const HotWorkspace& workspace) {
  forget_cached(segments.offsets);
  ChunkSums sums;
  sums.run(pipe, segments, workspace);
}

template <class Optimizer, class Weights>
__aicore__ inline void update_rows(TPipe* pipe, const UpdateRows& a, const HotWorkspace& workspace) {
  forget_cached(a.table_offsets);
  constexpr int kElementStates = Optimizer::kElementStates, kRowStates = Optimizer::kRowStates;
  RowsToUpdate rows{};
  rows.segments = a.segments;
  rows.records = a.cache;
  RecordShape& shape = rows.shape;
  shape = {a.layout.dim, a.layout.bytes, Weights::kBytes, kElementStates, kRowStates};
  if (kElementStates > 0) shape.element_states_offset = a.layout.state_offset[0];
  if (kRowStates > 0) shape.row_states_offset = a.layout.state_offset[kElementStates];
  for (int s = 0; s < kElementStates + kRowStates; ++s) {
    shape.narrow = shape.narrow || a.layout.state_dtype[s] != DType::kFloat32;
    shape.state_offset[s] = a.layout.state_offset[s];
    shape.state_dtype[s] = a.layout.state_dtype[s];
  }
  rows.tables = {a.table_offsets, a.tables, a.coefficients};
  rows.workspace = workspace;
  if (a.row_ids != nullptr) {
    forget_cached(a.row_ids);
    rows.rounding = {a.row_ids, a.rounding_seeds};
  }
  rows.norms = a.row_norms;
  UpdateTiles<Optimizer, Weights> tiles;
  tiles.run(pipe, rows);
}

}  // namespace ascendc
}  // namespace rec_sdk
