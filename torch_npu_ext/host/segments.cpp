#include "torch_npu_ext/host/segments.h"

namespace rec_sdk {
namespace {

// unique: from (key, count) to (slot, first position of its segment).
void number_segments(const Group& group, int32_t t, Scan* scan, PlanBuffers* plan) {
  const uint32_t slots = static_cast<uint32_t>(group.slots);
  const Range rows = scan->unique_rows(t);
  // From the key of a missing row to its place in the plan.
  const int64_t shift = plan->in_offsets[t] - scan->missing(t).begin - group.slots;
  int64_t u = plan->table_offsets[t];
  uint32_t position = static_cast<uint32_t>(rows.begin);  // of the table's first lookup
  for (int64_t r = rows.begin; r < rows.end; ++r, ++u) {
    UniqueRow& row = scan->unique[r];
    const uint32_t count = row.count;
    const uint32_t slot =
        row.key < slots ? row.key : static_cast<uint32_t>(plan->swap_in_slots[row.key + shift]);
    row = {slot, position};
    plan->unique_slots[u] = static_cast<int32_t>(slot);
    plan->segment_offsets[u] = static_cast<int32_t>(position);
    position += count;
  }
}

constexpr int64_t kPrefetchDistance = 32;

// The row of lookup i < end; prefetches that of a later one.
REC_SDK_ALWAYS_INLINE UniqueRow& next_row(const Scan& scan, int64_t i, int64_t end) {
  if (i + kPrefetchDistance < end) prefetch(&scan.unique[scan.local[i + kPrefetchDistance]]);
  return scan.unique[scan.local[i]];
}

void fill_sequence(const Batch::Piece& piece, const Scan& scan, PlanBuffers* plan) {
  for (int64_t i = piece.begin; i < piece.end; ++i) {
    UniqueRow& row = next_row(scan, i, piece.end);
    plan->slots[i] = static_cast<int32_t>(row.key);
    plan->grad_row[row.count++] = static_cast<int32_t>(i);
  }
}

template <bool kScaled, bool kWeighted>
void fill_pooled(const Batch::Piece& piece, const Feature& feature, const Scan& scan, PlanBuffers* plan) {
  const int32_t column = static_cast<int32_t>(feature.column);
  for (int64_t b = 0; b < piece.bags; ++b) {
    const int64_t begin = plan->offsets[piece.first_bag + b];
    const int64_t end = plan->offsets[piece.first_bag + b + 1];
    const int32_t sample = static_cast<int32_t>(piece.first_sample + b);
    const float scale = feature.mean && end > begin ? 1.0f / static_cast<float>(end - begin) : 1.0f;
    for (int64_t i = begin; i < end; ++i) {
      UniqueRow& row = next_row(scan, i, piece.end);
      const uint32_t position = row.count++;
      plan->slots[i] = static_cast<int32_t>(row.key);
      plan->grad_row[position] = sample;
      plan->grad_column[position] = column;
      if (kScaled) plan->scale[position] = scale;
      if (kWeighted) plan->positions[position] = static_cast<int32_t>(i);
    }
  }
}

}  // namespace

void write_segments(const Group& group, const Batch& batch, int32_t t, Scan* scan,
                    PlanBuffers* plan) noexcept {
  number_segments(group, t, scan, plan);
  for (size_t p = scan->piece_begin(t); p < scan->piece_end(t); ++p) {
    const Batch::Piece& piece = batch.pieces[p];
    if (!group.pooled) {
      fill_sequence(piece, *scan, plan);
      continue;
    }
    const auto fill = group.scaled     ? batch.weighted ? fill_pooled<true, true> : fill_pooled<true, false>
                      : batch.weighted ? fill_pooled<false, true>
                                       : fill_pooled<false, false>;
    fill(piece, group.features[piece.feature], *scan, plan);
  }
}

}  // namespace rec_sdk
