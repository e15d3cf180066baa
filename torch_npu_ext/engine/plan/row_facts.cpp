#include "torch_npu_ext/engine/plan/row_facts.h"

#include <algorithm>
#include <limits>

namespace rec_sdk {
namespace {

// visit(source, place) of the lookups of a share, in order: where each is in the batch's arrays, and its row
// in the facts.
template <class Visit>
void for_each_lookup(const Batch& batch, int64_t s, const Scan& scan, const PlanBuffers& plan,
                     const Visit& visit) {
  const Share& share = scan.share(s);
  const int64_t to_place = plan.table_offsets[share.table] + share.uniques_before - share.first;
  const int64_t spare = plan.uniques + s;
  const int64_t default_row = share.default_row < 0 ? std::numeric_limits<int64_t>::max() : share.default_row;
  const auto place = [&](int64_t row) __attribute__((always_inline)) {
    return row == default_row ? spare : row + to_place - (row > default_row);
  };
  int64_t next = 0;
  for (size_t p = scan.piece_begin(share.table); p < scan.piece_end(share.table); ++p) {
    const Batch::Piece& piece = batch.pieces[p];
    const int64_t shift = piece.source - piece.begin;
    if (share.lookups == nullptr) {
      const uint32_t* const rows = scan.local.data();
      for (int64_t i = piece.begin; i < piece.end; ++i) visit(i + shift, place(rows[i]));
      continue;
    }
    for (; next < share.count && share.lookups[next] < piece.end; ++next) {
      visit(share.lookups[next] + shift, place(share.rows[next]));
    }
  }
}

}  // namespace

void write_row_facts(const Group& group, const Batch& batch, int64_t s, const Scan& scan,
                     const PlanBuffers& plan, RowFacts* facts) noexcept {
  const Share& share = scan.share(s);
  const RowColumns& columns = group.tables[share.table].columns;
  const int64_t begin = plan.table_offsets[share.table] + share.uniques_before;
  const int64_t end = begin + share.rows_found();
  if (facts->has_shows && columns.has(Column::kCount)) {
    uint32_t* const shows = facts->shows.data();
    std::fill(shows + begin, shows + end, 0);
    for_each_lookup(batch, s, scan, plan, [&](int64_t source, int64_t place) {
      shows[place] = saturated_sum(shows[place], batch.shows_of(source));
    });
  }
  if (facts->has_clicks && columns.has(Column::kClicks)) {
    uint32_t* const clicks = facts->clicks.data();
    std::fill(clicks + begin, clicks + end, 0);
    for_each_lookup(batch, s, scan, plan, [&](int64_t source, int64_t place) {
      clicks[place] = saturated_sum(clicks[place], batch.clicks_of(source));
    });
  }
  if (facts->has_timestamps && columns.has(Column::kTimestamp)) {
    int64_t* const timestamps = facts->timestamps.data();
    const int64_t* const given = batch.timestamps;
    for_each_lookup(batch, s, scan, plan,
                    [&](int64_t source, int64_t place) { timestamps[place] = given[source]; });
  }
}

}  // namespace rec_sdk
