// The part of the protocol that models rec_sdk_torch/tbe/rows/snapshot.py. The rows of one moment are
// captured while training continues, and each row is captured before it changes. protocol.h includes this
// file.
#pragma once

#include "tests/engine/protocol.h"

namespace rec_sdk {

// Models SaveJob, from opening the snapshot until it is closed.
inline void Protocol::save_snapshot(Thread* t) {
  settled(t, [=] {
    open_snapshot();
    launch_.owner = planning_.owner = nullptr;
    pieces(t, 0, 0);
  });
}

// Models Snapshot.__init__, after all plans are applied and all write-backs are complete.
inline void Protocol::open_snapshot() {
  const auto [ids, slots, rows] = engine_->tables.rows(0);
  for (const int64_t id : ids) moment_[id] = weight(id);
  for (const int64_t id : came_) {
    if (moment_.count(id) == 0) violation("a snapshot lacks an id that has come");
  }
  const bool all = scenario_.saver == Saver::kAll;
  const int64_t count = all ? engine_->saves.open_snapshot(0) : engine_->saves.open_snapshot(0, ids);
  if (count != static_cast<int64_t>(moment_.size())) violation("a snapshot has another number of rows");
  snapshot_ = true;
}

// Models Snapshot.chunks and _take_from. Here the thread settles after one pass that captures no row.
inline void Protocol::pieces(Thread* t, size_t place, int passes_without) {
  const uint64_t what = Hash{place, static_cast<uint64_t>(passes_without)}.word();
  const auto guard = [=] { return launch_.free_for(t); };
  if (passes_without > 1) {
    settled(t, [=] {
      take_rest(t, [=] {
        launch_.owner = planning_.owner = nullptr;
        pieces(t, 0, 0);
      });
    });
    return;
  }
  t->then("snapshot: a piece", what, guard, [=] {
    if (engine_->saves.snapshot_pending(0) == 0) return end_snapshot(t);
    launch_.owner = t;
    TakenRows taken;
    size_t next = 0;
    if (scenario_.saver == Saver::kIds) {
      auto at = std::next(moment_.begin(), static_cast<std::ptrdiff_t>(place));
      taken = engine_->saves.take_ids(0, {&at->first, 1});
      next = (place + 1) % moment_.size();
    } else {
      taken = engine_->saves.take_next(0, 0, 1).first;
    }
    const int without = taken.ids.empty() ? passes_without + (next == 0) : 0;
    read_taken(t, taken, [=] {
      launch_.owner = nullptr;
      pieces(t, next, without);
    });
  });
}

// Models Snapshot.before_all_change.
inline void Protocol::take_rest(Thread* t, Action then) {
  const auto [taken, next] = engine_->saves.take_next(0, 0, kSlots + 4);
  if (next >= 0) violation("a table of four rows has more");
  if (engine_->saves.snapshot_pending(0) != 0)
    violation("nobody has put aside rows of a snapshot that are gone");
  read_taken(t, taken, std::move(then));
}

// Models Snapshot.close.
inline void Protocol::end_snapshot(Thread* t) {
  for (const auto& row : moment_) {
    if (taken_.count(row.first) == 0) violation("a snapshot lacks a row that nobody reads any more");
  }
  t->then(
      "snapshot: close", 0, [=] { return launch_.free_for(t); },
      [=] {
        engine_->saves.close_snapshot(0);
        snapshot_ = false;
        moment_.clear();
        taken_.clear();
      });
}

// Models Snapshot.before_update, which Group.update calls under the launch lock.
inline void Protocol::before_update(Thread* t, const Made& made, Action then) {
  TakenRows taken;
  const PlanBuffers& p = **made.host;
  if (snapshot_ && !has(Bug::kUpdatesUntaken)) {
    taken = engine_->saves.take_slots(0, {p.unique_slots, p.uniques});
  }
  read_taken(t, taken, std::move(then));
}

// Models Snapshot._read and Group.gather. The thread keeps the launch lock while it waits for the copy of
// rows in the cache.
inline void Protocol::read_taken(Thread* t, const TakenRows& taken, Action then) {
  std::vector<int64_t> ids;
  std::vector<size_t> slots;
  std::vector<Touch> touches;
  Hash hash;
  for (size_t i = 0; i < taken.ids.size(); ++i) {
    if (taken.slots[i] < 0) {
      compare_taken(taken.ids[i], protocol::value_of(&taken.records[i * bytes_]));
      continue;
    }
    ids.push_back(taken.ids[i]);
    slots.push_back(static_cast<size_t>(taken.slots[i]));
    touches.push_back(reads_slot(taken.slots[i]));
    hash.add(slots.back());
  }
  if (ids.empty()) return then();
  const auto copy = [=] {
    if (t == &saver_) stream_ = has(Bug::kTakesUnordered) ? 1 : 0;
    if (!has(Bug::kTakesUnordered)) follow();
    device_.launch(stream_, "a gather of a snapshot", {hash.word(), t == &saver_}, touches, [=] {
      for (const size_t slot : slots) copies_[t].push_back(device_.cache[slot]);
    });
    const Event read = device_.tail(stream_);
    t->then(
        "snapshot: rows are read", hash.word(), [=] { return device_.done(read); },
        [=] {
          device_.waited(read);
          for (size_t i = 0; i < ids.size(); ++i) compare_taken(ids[i], copies_.at(t)[i]);
          copies_.erase(t);
          then();
        });
  };
  if (!has(Bug::kTakesUnlocked) || t != &saver_) return copy();
  launch_.owner = nullptr;
  t->then("snapshot: reads after its lock", hash.word(), [=] { return launch_.free_for(t); }, copy);
}

inline void Protocol::compare_taken(int64_t id, float found) {
  const auto expected = moment_.find(id);
  if (expected == moment_.end()) return violation("a snapshot has a row that came later");
  if (!taken_.insert(id).second) violation("a snapshot has a row twice");
  if (protocol::bits_of(found) != protocol::bits_of(expected->second)) {
    violation("a snapshot has " + std::to_string(found) + " for id " + std::to_string(id) + ", which was " +
              std::to_string(expected->second));
  }
}

}  // namespace rec_sdk
