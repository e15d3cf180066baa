#include "torch_npu_ext/engine/life/timestamps.h"

#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {
namespace {

void advance(Group* group, int32_t t, const Batch& batch, LifeLog* log) {
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
      if (latest != LifeClock::kNever) visit(latest);
    });
  };
  const auto advance_by = [&](const auto& for_each) {
    log->most = clock == LifeClock::kNever ? most_at_first(for_each) : most_ahead_of(clock);
    clock = std::max(clock, latest_up_to(log->most, for_each));
  };
  batch.latest == nullptr ? advance_by(of_lookups) : advance_by(of_keys);
  for_each_piece([&](const Batch::Piece& piece) {
    for (int64_t i = piece.source; i < piece.source + piece.end - piece.begin; ++i) {
      if (batch.timestamps[i] <= log->most) continue;
      if (log->set_aside++ == 0) {
        log->example = {batch.values[i], batch.timestamps[i]};
        log->latest = clock;
      }
    }
  });
}

}  // namespace

void advance_timestamps(Group* group, const Batch& batch, PlanBuffers* plan) noexcept {
  for_each_part(static_cast<int64_t>(group->tables.size()), batch.lookups, [&](int64_t t) noexcept {
    if (!group->tables[t].spec().life.needs_timestamps()) return;
    advance(group, static_cast<int32_t>(t), batch, &plan->life[t]);
  });
}

}  // namespace rec_sdk
