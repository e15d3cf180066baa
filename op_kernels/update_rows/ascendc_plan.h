// Host side of update_rows and accumulate_rows: the layout of the workspace, and the number of cores of each
// launch.
#pragma once

#include "op_kernels/common/ascendc/blocks.h"
#include "op_kernels/common/ascendc/hot_rows.h"

namespace rec_sdk {
namespace ascendc {

inline int64_t fewer(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t workspace_places(int64_t lookups) { return (lookups + kChunk - 1) / kChunk; }
inline int64_t workspace_pitch(int64_t dim) { return round_up(dim, kUbBlock / 4); }

// Returns the bytes of the table of gradients; 0 if there is only one gradient.
inline int64_t gradient_table_bytes(const Lookups& lookups) {
  static_assert(sizeof(Gradient) % kUbBlock == 0, "what follows the table begins at a whole UB block");
  return lookups.grad_source != nullptr ? lookups.grad_count * static_cast<int64_t>(sizeof(Gradient)) : 0;
}

inline int64_t hot_workspace_bytes(const Segments& segments) {
  const int64_t lookups = segments.lookups.count;
  if (segments.hot_segment_count == 0 || lookups <= kLookupsWithoutChunks) return 0;
  return workspace_places(lookups) * workspace_pitch(segments.dim) * 4;
}

inline int64_t workspace_bytes(const Segments& segments) {
  return gradient_table_bytes(segments.lookups) + hot_workspace_bytes(segments);
}

// Writes the table of gradients to the workspace with one call of write(part) per part, and sets
// lookups->grads to it.
template <class Write>
void put_gradient_table(Lookups* lookups, void* workspace, const Write& write) {
  if (lookups->grad_source == nullptr) return;
  auto* table = static_cast<Gradient*>(workspace);
  for (int64_t first = 0; first < lookups->grad_count; first += GradientTablePart::kMost) {
    GradientTablePart part{};
    part.count = fewer(GradientTablePart::kMost, lookups->grad_count - first);
    part.to = table + first;
    for (int64_t i = 0; i < part.count; ++i) part.grads[i] = lookups->grads[first + i];
    write(part);
  }
  lookups->grads = table;
}

// Returns the part of the workspace for the sums of hot rows; null if the rows are updated in one launch.
inline HotWorkspace hot_workspace(void* base, const Segments& segments) {
  if (hot_workspace_bytes(segments) == 0) return {nullptr, 0};
  auto* sums = static_cast<uint8_t*>(base) + gradient_table_bytes(segments.lookups);
  return {reinterpret_cast<float*>(sums), workspace_pitch(segments.dim)};
}

inline int64_t chunk_blocks(const Segments& segments, int64_t cores) {
  const int64_t chunks = segments.lookups.count / kChunk;
  return fewer(chunks, blocks_for(chunks * kChunk * segments.dim * 4, cores));
}

inline int64_t update_blocks(const Segments& segments, int64_t record_bytes, int64_t cores) {
  const int64_t bytes = segments.rows * 2 * record_bytes + segments.lookups.count * segments.dim * 4;
  return fewer(segments.rows, blocks_for(bytes, cores));
}

}  // namespace ascendc
}  // namespace rec_sdk
