#include "torch_npu_ext/host/segments.h"

namespace rec_sdk {
namespace {

// unique: from (key, count) to (slot, first position of its segment).
void number_segments(const Group& group, Scan* scan, PlanBuffers* plan) {
  const int32_t tables = static_cast<int32_t>(group.tables.size());
  for (int32_t t = 0; t < tables; ++t) {
    plan->table_offsets[t + 1] = static_cast<int32_t>(scan->unique_end(t));
  }
  plan->uniques = plan->table_offsets[tables];
  const uint32_t slots = static_cast<uint32_t>(group.slots);
  uint32_t position = 0;
  for (int64_t u = 0; u < plan->uniques; ++u) {
    UniqueRow& row = scan->unique[u];
    const uint32_t count = row.count;
    const uint32_t slot =
        row.key < slots ? row.key : static_cast<uint32_t>(plan->swap_in_slots[row.key - slots]);
    row = {slot, position};
    plan->unique_slots[u] = static_cast<int32_t>(slot);
    plan->segment_offsets[u] = static_cast<int32_t>(position);
    position += count;
  }
  plan->segment_offsets[plan->uniques] = static_cast<int32_t>(position);
}

void fill_sequence(const Scan& scan, PlanBuffers* plan) {
  for (int64_t i = 0; i < plan->lookups; ++i) {
    UniqueRow& row = scan.unique[scan.local[i]];
    plan->slots[i] = static_cast<int32_t>(row.key);
    plan->positions[row.count++] = static_cast<int32_t>(i);
  }
}

template <bool kScaled>
void fill_pooled(const Group& group, const Batch& batch, const Scan& scan, PlanBuffers* plan) {
  for (const Batch::Piece& piece : batch.pieces) {
    const Feature& feature = group.features[piece.feature];
    const int32_t column = static_cast<int32_t>(feature.column);
    for (int64_t b = 0; b < piece.bags; ++b) {
      const int64_t begin = plan->offsets[piece.first_bag + b];
      const int64_t end = plan->offsets[piece.first_bag + b + 1];
      const int32_t sample = static_cast<int32_t>(piece.first_sample + b);
      const float scale = feature.mean && end > begin ? 1.0f / static_cast<float>(end - begin) : 1.0f;
      for (int64_t i = begin; i < end; ++i) {
        UniqueRow& row = scan.unique[scan.local[i]];
        const uint32_t position = row.count++;
        plan->slots[i] = static_cast<int32_t>(row.key);
        plan->positions[position] = static_cast<int32_t>(i);
        plan->grad_row[position] = sample;
        plan->grad_column[position] = column;
        if (kScaled) plan->scale[position] = scale;
      }
    }
  }
}

}  // namespace

void write_segments(const Group& group, const Batch& batch, Scan* scan, PlanBuffers* plan) noexcept {
  number_segments(group, scan, plan);
  if (!group.pooled) {
    fill_sequence(*scan, plan);
  } else if (group.scaled) {
    fill_pooled<true>(group, batch, *scan, plan);
  } else {
    fill_pooled<false>(group, batch, *scan, plan);
  }
}

}  // namespace rec_sdk
