#include "torch_npu_ext/engine/lifecycle/timestamps.h"

#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {
namespace {

// Returns the latest timestamp. Four independent chains of comparisons are used, whose latencies overlap.
int64_t latest_of(const int64_t* times, int64_t count) {
  int64_t latest[4] = {TableClock::kNever, TableClock::kNever, TableClock::kNever, TableClock::kNever};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int64_t k = 0; k < 4; ++k) latest[k] = std::max(latest[k], times[i + k]);
  }
  for (; i < count; ++i) latest[0] = std::max(latest[0], times[i]);
  return std::max(std::max(latest[0], latest[1]), std::max(latest[2], latest[3]));
}

void advance(Group* group, int32_t t, const Batch& batch, LifecycleLog* log) {
  int64_t& clock = group->tables[t].clock.timestamp;
  const auto for_each_piece = [&](const auto& visit) {
    for (const Batch::Piece& piece : batch.pieces) {
      if (group->features[piece.feature].table == t) visit(piece);
    }
  };
  const auto of_lookups = [&](const auto& visit) {
    for_each_piece([&](const Batch::Piece& piece) {
      const int64_t* const times = batch.timestamps + piece.source;
      for (int64_t i = 0; i < piece.end - piece.begin; ++i) visit(times[i]);
    });
  };
  const auto of_keys = [&](const auto& visit) {
    for_each_piece([&](const Batch::Piece& piece) {
      const int64_t latest = batch.latest[batch.feature_keys[piece.feature]];
      if (latest != TableClock::kNever) visit(latest);
    });
  };
  const auto advance_by = [&](const auto& for_each) {
    log->most = clock == TableClock::kNever ? most_at_first(for_each) : most_ahead_of(clock);
    clock = std::max(clock, latest_up_to(log->most, for_each));
  };
  if (batch.latest == nullptr && clock != TableClock::kNever) {
    int64_t latest = clock;
    for_each_piece([&](const Batch::Piece& piece) {
      latest = std::max(latest, latest_of(batch.timestamps + piece.source, piece.end - piece.begin));
    });
    if (latest <= most_ahead_of(clock)) {  // in the common case, no timestamp is rejected
      log->most = most_ahead_of(clock);
      clock = latest;
      return;
    }
  }
  batch.latest == nullptr ? advance_by(of_lookups) : advance_by(of_keys);
  for_each_piece([&](const Batch::Piece& piece) {
    for (int64_t i = piece.source; i < piece.source + piece.end - piece.begin; ++i) {
      if (batch.timestamps[i] <= log->most) continue;
      if (log->rejected++ == 0) {
        log->example = {batch.values[i], batch.timestamps[i]};
        log->latest = clock;
      }
    }
  });
}

}  // namespace

void advance_timestamps(Group* group, const Batch& batch, PlanBuffers* plan) noexcept {
  for_each_part(static_cast<int64_t>(group->tables.size()), batch.lookups, [&](int64_t t) noexcept {
    if (!group->tables[t].spec().rules.needs_timestamps()) return;
    advance(group, static_cast<int32_t>(t), batch, &plan->lifecycle_logs[t]);
  });
}

}  // namespace rec_sdk
