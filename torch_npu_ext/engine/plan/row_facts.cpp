#include "torch_npu_ext/engine/plan/row_facts.h"

#include <algorithm>

namespace rec_sdk {
namespace {

// visit(source, row) of the lookups of a share, in order: where each is in the batch's arrays, and the number
// of its row.
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

void write_row_facts(const Group& group, const Batch& batch, int64_t s, const Scan& scan,
                     RowFacts* facts) noexcept {
  const Share& share = scan.share(s);
  const RowColumns& columns = group.tables[share.table].columns;
  if (facts->has_shows && columns.has(Column::kCount)) {
    uint32_t* const shows = facts->shows.data();
    const int32_t* const given = batch.shows;
    std::fill(shows + share.first, shows + share.end(), 0);
    for_each_lookup(batch, share, scan, [&](int64_t source, uint32_t row) {
      shows[row] = saturated_sum(shows[row], Batch::shows_in(given[source]));
    });
  }
  if (facts->has_clicks && columns.has(Column::kClicks)) {
    uint32_t* const clicks = facts->clicks.data();
    const int32_t* const given = batch.clicks;
    std::fill(clicks + share.first, clicks + share.end(), 0);
    for_each_lookup(batch, share, scan, [&](int64_t source, uint32_t row) {
      clicks[row] = saturated_sum(clicks[row], Batch::clicks_in(given[source]));
    });
  }
  if (facts->has_timestamps && columns.has(Column::kTimestamp)) {
    int64_t* const timestamps = facts->timestamps.data();
    const int64_t* const given = batch.timestamps;
    for_each_lookup(batch, share, scan,
                    [&](int64_t source, uint32_t row) { timestamps[row] = given[source]; });
  }
}

}  // namespace rec_sdk
