#include "torch_npu_ext/engine/plan/row_signals.h"

#include <algorithm>
#include <cstdint>

namespace rec_sdk {
namespace {

// Calls visit(source, row) for the lookups of a share, in order, with the index of the lookup in the batch's
// arrays and the number of its row.
template <class Visit>
REC_SDK_ALWAYS_INLINE void for_each_lookup(const Batch& batch, const Share& share, const Scan& scan,
                                           const Visit& visit) {
  int64_t next = 0;
  for (size_t p = scan.piece_begin(share.table); p < scan.piece_end(share.table); ++p) {
    const Batch::Piece& piece = batch.pieces[p];
    const int64_t shift = piece.source - piece.begin;
    if (share.lookups == nullptr) {
      const uint32_t* const rows = scan.local.data();
      for (int64_t i = piece.begin; i < piece.end; ++i) visit(i + shift, rows[i]);
      continue;
    }
    for (; next < share.count && share.lookups[next] < piece.end; ++next) {
      visit(share.lookups[next] + shift, share.rows[next]);
    }
  }
}

// Returns whether 32-bit additions without clamping and saturation give the right sums. This is so if all
// labels of a table are at least `least`, which is not negative, and their sum fits into 32 bits. It is the
// common case, as with labels of 0 and 1.
bool adds_exactly(const Batch& batch, int32_t t, const Scan& scan, const int32_t* labels, int32_t least) {
  uint32_t bits = 0, below = 0;  // both have the same type, so that the loop is vectorized
  for (size_t p = scan.piece_begin(t); p < scan.piece_end(t); ++p) {
    const int32_t* const of_piece = labels + batch.pieces[p].source;
    const int64_t count = batch.pieces[p].end - batch.pieces[p].begin;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t number = static_cast<uint32_t>(of_piece[i]);
      bits |= number;
      below |= number - static_cast<uint32_t>(least);  // the highest bit is set if number < least
    }
  }
  const uint64_t most = static_cast<uint64_t>(bits) * static_cast<uint64_t>(batch.lookups);
  return below >> 31 == 0 && bits >> 31 == 0 && most <= UINT32_MAX;
}

// Sets sums[row] to the sum of the labels of the row's lookups, for all rows of a share. number(label) clamps
// a label to `least`.
template <class Number>
void add_up(const Batch& batch, const Share& share, const Scan& scan, const int32_t* labels, int32_t least,
            uint32_t* sums, const Number& number) {
  std::fill(sums + share.first, sums + share.end(), 0);
  if (adds_exactly(batch, share.table, scan, labels, least)) {
    for_each_lookup(batch, share, scan, [&](int64_t source, uint32_t row) {
      sums[row] += static_cast<uint32_t>(labels[source]);
    });
    return;
  }
  for_each_lookup(batch, share, scan, [&](int64_t source, uint32_t row) {
    sums[row] = saturated_sum(sums[row], number(labels[source]));
  });
}

}  // namespace

void list_runs(const Group& group, const Scan& scan, const PlanBuffers& plan, std::vector<RowRun>* runs) {
  runs->clear();
  for (int64_t s = 0; s < scan.share_count(); ++s) {
    const Share& share = scan.share(s);
    if (group.tables[share.table].columns.empty()) continue;
    const int64_t begin = plan.table_offsets[share.table] + share.uniques_before;
    const int64_t before_default =
        share.default_row >= 0 ? share.default_row - share.first : share.rows_found();
    const auto add = [&](int64_t first, int64_t end, int64_t shift) {
      if (first == end) return;
      runs->push_back({share.table, static_cast<int32_t>(first), static_cast<int32_t>(end), shift});
    };
    add(begin, begin + before_default, share.first - begin);
    add(begin + before_default, begin + share.rows_found(), share.first + 1 - begin);
  }
}

void sum_row_signals(const Group& group, const Batch& batch, int64_t s, const Scan& scan,
                     RowSignals* signals) noexcept {
  const Share& share = scan.share(s);
  const RowColumns& columns = group.tables[share.table].columns;
  if (signals->has_shows && columns.has(Column::kCount)) {
    add_up(batch, share, scan, batch.shows, 1, signals->shows.data(), Batch::shows_in);
  }
  if (signals->has_clicks && columns.has(Column::kClicks)) {
    add_up(batch, share, scan, batch.clicks, 0, signals->clicks.data(), Batch::clicks_in);
  }
  if (signals->has_timestamps && columns.has(Column::kTimestamp)) {
    int64_t* const timestamps = signals->timestamps.data();
    const int64_t* const source_times = batch.timestamps;
    for_each_lookup(batch, share, scan,
                    [&](int64_t source, uint32_t row) { timestamps[row] = source_times[source]; });
  }
}

}  // namespace rec_sdk
