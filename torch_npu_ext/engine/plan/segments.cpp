#include "torch_npu_ext/engine/plan/segments.h"

#include <algorithm>

#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {
namespace {

constexpr int64_t kPrefetchDistance = kReadBeyond;

// A function from the keys of a table's rows to their slots.
class Slots {
 public:
  Slots(const Group& group, int32_t t, const Scan& scan, const PlanBuffers& plan)
      : slots_(static_cast<uint32_t>(group.slots)),
        swap_in_slots_(plan.swap_in_slots),
        shift_(plan.in_offsets[t] - scan.missing(t).begin - group.slots) {}
  uint32_t of(RowKey key) const {
    return key < slots_ ? key : static_cast<uint32_t>(swap_in_slots_[key + shift_]);
  }

 private:
  uint32_t slots_;
  const int32_t* swap_in_slots_;
  int64_t shift_;  // the index of a missing row in the plan minus its key
};

// Writes the slots and segments of a share's rows to the plan. Replaces each (key, count) in `unique` by the
// slot and the first position of the row's segment.
void number_segments(const Group& group, const Share& share, const Slots& slots, Scan* scan,
                     PlanBuffers* plan) {
  UniqueRow* const unique = scan->unique.data();
  int64_t u = plan->table_offsets[share.table] + share.uniques_before;
  uint32_t position = static_cast<uint32_t>(share.position);
  if (scan->missing(share.table).size() > 0) {
    for (int64_t r = share.first; r < share.end(); ++r) unique[r].key = slots.of(unique[r].key);
  }
  const auto number = [&](int64_t begin, int64_t end) {
    UniqueRow* const rows = unique + begin;
    int32_t* const unique_slots = plan->unique_slots + u;
    int32_t* const segment_offsets = plan->segment_offsets + u;
#pragma GCC unroll 4
    for (int64_t r = 0; r < end - begin; ++r) {
      const uint32_t count = rows[r].count;
      rows[r].count = position;
      unique_slots[r] = static_cast<int32_t>(rows[r].key);
      segment_offsets[r] = static_cast<int32_t>(position);
      record_hot_segment(plan->hot_segments, u + r, position, count);
      position += count;
    }
    u += end - begin;
  };
  if (share.default_row < 0) {
    number(share.first, share.end());
  } else {
    number(share.first, share.default_row);
    unique[share.default_row].count = static_cast<uint32_t>(share.default_position);
    number(share.default_row + 1, share.end());
  }
  if (plan->unique_ids == nullptr) return;
  for (int64_t v = plan->table_offsets[share.table] + share.uniques_before; v < u; ++v) {
    if (v + kPrefetchDistance < u) prefetch(&group.slot_ids[plan->unique_slots[v + kPrefetchDistance]]);
    plan->unique_ids[v] = group.slot_ids[plan->unique_slots[v]];
  }
}

// Access to the lookups of a share, in order: AllLookups for all lookups of a table, ListedLookups for a
// list. end_before() returns the end of the share's lookups from `next` on whose index in the batch is below
// `limit`, the end of a piece or a bag.
struct AllLookups {
  static constexpr bool kAll = true;
  int64_t first, count;
  const uint32_t* local;
  REC_SDK_ALWAYS_INLINE int64_t lookup(int64_t i) const { return first + i; }
  REC_SDK_ALWAYS_INLINE int64_t end_before(int64_t, int64_t limit) const { return limit - first; }
  REC_SDK_ALWAYS_INLINE uint32_t row(int64_t i) const { return local[first + i]; }
};
struct ListedLookups {
  static constexpr bool kAll = false;
  int64_t count;
  const uint32_t* lookups;
  const uint32_t* rows;
  REC_SDK_ALWAYS_INLINE int64_t lookup(int64_t i) const { return lookups[i]; }
  REC_SDK_ALWAYS_INLINE int64_t end_before(int64_t next, int64_t limit) const {
    while (next < count && lookups[next] < limit) ++next;
    return next;
  }
  REC_SDK_ALWAYS_INLINE uint32_t row(int64_t i) const { return rows[i]; }
};

// Returns the position of the i-th lookup in segment order.
template <class Lookups>
REC_SDK_ALWAYS_INLINE uint32_t next_position(const Lookups& lookups, int64_t i, UniqueRow* unique,
                                             PlanBuffers* plan) {
  prefetch(&unique[lookups.row(i + kPrefetchDistance)]);
  UniqueRow& row = unique[lookups.row(i)];
  if (Lookups::kAll) plan->slots[lookups.lookup(i)] = static_cast<int32_t>(row.key);
  return row.count++;
}

// Fills the arrays of lookups for one piece, which contains all lookups of a feature. `first` is the lookup
// of the first row of its gradient. *i is the next lookup of the share, and is advanced.
template <bool kSources, class Lookups>
void fill_sequence(const Batch::Piece& piece, int64_t first, const Lookups& lookups, int64_t* i,
                   UniqueRow* unique, PlanBuffers* plan) {
  const int64_t end = lookups.end_before(*i, piece.end);
#pragma GCC unroll 8
  for (int64_t next = *i; next < end; ++next) {
    const uint32_t position = next_position(lookups, next, unique, plan);
    plan->grad_row[position] = static_cast<int32_t>(lookups.lookup(next) - first);
    if (kSources) plan->grad_source[position] = static_cast<int32_t>(piece.feature);
  }
  *i = end;
}

// Fills the arrays of lookups for one piece of a pooled feature. *i is the next lookup of the share, and is
// advanced.
template <bool kScaled, bool kWeighted, class Lookups>
void fill_pooled(const Batch::Piece& piece, const Feature& feature, const Lookups& lookups, int64_t* i,
                 UniqueRow* unique, PlanBuffers* plan) {
  const int32_t column = static_cast<int32_t>(feature.column);
  int64_t next = *i;
  for (int64_t b = 0; b < piece.bags; ++b) {
    const int64_t begin = plan->offsets[piece.first_bag + b];
    const int64_t end = plan->offsets[piece.first_bag + b + 1];
    const int32_t sample = static_cast<int32_t>(piece.first_sample + b);
    const float scale = feature.mean && end > begin ? 1.0f / static_cast<float>(end - begin) : 1.0f;
    for (const int64_t end_of_bag = lookups.end_before(next, end); next < end_of_bag; ++next) {
      const uint32_t position = next_position(lookups, next, unique, plan);
      plan->grad_row[position] = sample;
      plan->grad_column[position] = column;
      if (kScaled) plan->scale[position] = scale;
      if (kWeighted) plan->positions[position] = static_cast<int32_t>(lookups.lookup(next));
    }
  }
  *i = next;
}

template <class Lookups>
void fill(const Group& group, const Batch& batch, int32_t t, const Lookups& lookups, Scan* scan,
          PlanBuffers* plan) {
  UniqueRow* const unique = scan->unique.data();
  int64_t next = 0;
  for (size_t p = scan->piece_begin(t); !group.pooled && p < scan->piece_end(t); ++p) {
    const Batch::Piece& piece = batch.pieces[p];
    const bool sources = plan->grad_source != nullptr;
    const auto fill_piece = sources ? fill_sequence<true, Lookups> : fill_sequence<false, Lookups>;
    fill_piece(piece, batch.joined ? 0 : piece.begin, lookups, &next, unique, plan);
  }
  if (!group.pooled) return;
  const auto fill_piece =
      group.scaled     ? batch.weighted ? fill_pooled<true, true, Lookups> : fill_pooled<true, false, Lookups>
      : batch.weighted ? fill_pooled<false, true, Lookups>
                       : fill_pooled<false, false, Lookups>;
  for (size_t p = scan->piece_begin(t); p < scan->piece_end(t); ++p) {
    const Batch::Piece& piece = batch.pieces[p];
    fill_piece(piece, group.features[piece.feature], lookups, &next, unique, plan);
  }
}

}  // namespace

void write_segments(const Group& group, const Batch& batch, int64_t s, Scan* scan,
                    PlanBuffers* plan) noexcept {
  const Share& share = scan->share(s);
  const Slots slots(group, share.table, *scan, *plan);
  number_segments(group, share, slots, scan, plan);
  if (share.lookups == nullptr) {
    fill(group, batch, share.table, AllLookups{share.first, share.count, scan->local.data()}, scan, plan);
    return;
  }
  fill(group, batch, share.table, ListedLookups{share.count, share.lookups, share.rows}, scan, plan);
  // The lookups of the shares of a table are interleaved. For the plan's slots, each share therefore handles
  // a contiguous range of lookups instead of its own.
  for (int64_t i = share.first; i < share.first + share.count; ++i) {
    plan->slots[i] = static_cast<int32_t>(slots.of(scan->local[i]));
  }
}

void write_origins(Group* group, PlanBuffers* plan) noexcept {
  constexpr int64_t kPiece = 16384;
  int32_t* const of_slot = group->origin_of_slot.data();
  const int32_t* const in_slots = plan->swap_in_slots;
  for (int64_t i = 0; i < plan->rows_in; ++i) {
    if (i + kPrefetchDistance < plan->rows_in) prefetch(&of_slot[in_slots[i + kPrefetchDistance]]);
    of_slot[in_slots[i]] = static_cast<int32_t>(group->slots + i);
  }
  run_pieces((plan->lookups + kPiece - 1) / kPiece, [&](int64_t piece) noexcept {
    const int64_t end = std::min(plan->lookups, (piece + 1) * kPiece);
    for (int64_t j = piece * kPiece; j < end; ++j) {
      if (j + kPrefetchDistance < end) prefetch(&of_slot[plan->slots[j + kPrefetchDistance]]);
      plan->origins[j] = of_slot[plan->slots[j]];
    }
  });
  for (int64_t i = 0; i < plan->rows_in; ++i) of_slot[in_slots[i]] = in_slots[i];
}

}  // namespace rec_sdk
