// The engine's calls on snapshots: rows of one moment are taken while batches are planned and applied.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "torch_npu_ext/engine/api/engine.h"

namespace rec_sdk {
namespace {

Snapshot& open_one(Table& table) {
  if (table.snapshot == nullptr) {
    throw std::runtime_error("table '" + table.spec().name + "' has no snapshot");
  }
  if (table.snapshot->failed()) {
    throw std::runtime_error("table '" + table.spec().name + "': memory was short for what a snapshot keeps");
  }
  return *table.snapshot;
}

}  // namespace

int64_t Engine::open_snapshot(int32_t t, const int64_t* ids, int64_t count) {
  const auto guard = lock_settled("a snapshot");
  Table& target = table(t);
  if (target.snapshot != nullptr) {
    throw std::runtime_error("table '" + target.spec().name + "' has a snapshot already");
  }
  const int64_t bound = target.row_bound();
  auto snapshot = std::make_unique<Snapshot>(bound);
  if (ids != nullptr) {
    constexpr int64_t kAhead = 16;
    uint32_t row = 0, slot = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) target.prefetch_slot(ids[i + kAhead]);
      if (target.locate(ids[i], &row, &slot)) snapshot->add(row);
    }
  } else {
    snapshot->add_all();
    if (target.spec().hashed) {
      target.directory().for_each_free([&](uint32_t row) { snapshot->leave_out(row); });
    }
  }
  target.snapshot = std::move(snapshot);
  return target.snapshot->pending();
}

void Engine::close_snapshot(int32_t t) {
  const auto guard = lock();
  table(t).snapshot.reset();
}

int64_t Engine::snapshot_pending(int32_t t) {
  const auto guard = lock();
  return open_one(table(t)).pending();
}

// The rows that come or go with a plan that is not applied, or that are on their way to the store.
template <class Visit>
void Engine::for_each_moving_row(int32_t t, const Visit& visit) const {
  const auto all = [&visit, t](const std::vector<int32_t>& offsets, const uint32_t* rows) {
    std::for_each(rows + offsets[t], rows + offsets[t + 1], visit);
  };
  order_.for_each([&all](const std::shared_ptr<PlanBuffers>& plan) {
    all(plan->in_offsets, plan->swap_in_rows);
    all(plan->out_offsets, plan->swap_out_rows);
  });
  group_.transit.for_each([&all](const PlanBuffers& plan) { all(plan.out_offsets, plan.swap_out_rows); });
}

// Marks the moving rows of a snapshot as long as it lives: a piece of a save is small, and they are many.
class Engine::MovingRows {
 public:
  MovingRows(const Engine& engine, int32_t table, Snapshot* snapshot)
      : engine_(engine), table_(table), snapshot_(snapshot) {
    set(true);
  }
  ~MovingRows() { set(false); }
  MovingRows(const MovingRows&) = delete;
  MovingRows& operator=(const MovingRows&) = delete;

 private:
  void set(bool moving) {
    engine_.for_each_moving_row(table_, [&](uint32_t row) { snapshot_->set_moving(row, moving); });
  }

  const Engine& engine_;
  const int32_t table_;
  Snapshot* const snapshot_;
};

void Engine::take(Table* source, int64_t id, uint32_t row, uint32_t slot, TakenRows* taken) {
  taken->ids.push_back(id);
  taken->slots.push_back(static_cast<int32_t>(slot));
  taken->rows.push_back(row);
  taken->columns.push_back(source->snapshot->take(row, source->columns));
}

// All at once: rows lie anywhere in the store.
void Engine::copy_records(const Table& source, TakenRows* taken) const {
  constexpr size_t kAhead = 8;
  const size_t bytes = static_cast<size_t>(group_.layout.bytes), count = taken->ids.size();
  const auto resident = [](int32_t slot) { return static_cast<uint32_t>(slot) != kNoSlot; };
  if (std::all_of(taken->slots.begin(), taken->slots.end(), resident)) return;
  taken->records.resize(count * bytes);
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) source.store.prefetch(taken->rows[i + kAhead]);
    if (resident(taken->slots[i])) continue;  // the caller reads the cache
    char* const record = taken->records.data() + i * bytes;
    if (!source.store.read(taken->rows[i], record)) source.initializer.write(taken->ids[i], record);
  }
}

void Engine::take_ids(int32_t t, const int64_t* ids, int64_t count, TakenRows* taken) {
  const auto guard = lock();
  Table& source = table(t);
  Snapshot& snapshot = open_one(source);
  const MovingRows moving(*this, t, &snapshot);
  uint32_t row = 0, slot = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!source.locate(ids[i], &row, &slot) || !snapshot.has_still(row)) continue;
    take(&source, ids[i], row, slot, taken);
  }
  copy_records(source, taken);
}

void Engine::take_slots(int32_t t, const int32_t* slots, int64_t count, TakenRows* taken) {
  const auto guard = lock();
  Table& source = table(t);
  const Snapshot& snapshot = open_one(source);
  taken->reserve(static_cast<size_t>(std::min(count, snapshot.pending())));
  for (int64_t i = 0; i < count; ++i) {
    const int32_t slot = slots[i];
    if (slot < source.first_slot() || slot >= source.first_slot() + source.spec().slots) continue;
    const int64_t id = group_.slot_ids[slot];
    const uint32_t row = source.row_in(static_cast<uint32_t>(slot), id);
    if (snapshot.has(row)) take(&source, id, row, static_cast<uint32_t>(slot), taken);
  }
  copy_records(source, taken);
}

int64_t Engine::take_next(int32_t t, int64_t begin, int64_t least, TakenRows* taken) {
  constexpr int64_t kStep = 256;  // buckets, or rows
  const auto guard = lock();
  Table& source = table(t);
  Snapshot& snapshot = open_one(source);
  const MovingRows moving(*this, t, &snapshot);
  const bool hashed = source.spec().hashed;
  const int64_t end =
      hashed ? static_cast<int64_t>(source.map().bucket_count()) : source.spec().num_embeddings;
  const auto visit = [&](int64_t id, uint32_t row, uint32_t slot) {
    if (snapshot.has_still(row)) take(&source, id, row, slot, taken);
  };
  int64_t at = std::max<int64_t>(begin, 0);
  for (; at < end && static_cast<int64_t>(taken->ids.size()) < least; at += kStep) {
    if (hashed) {
      source.map().for_each_from(static_cast<uint64_t>(at), static_cast<uint64_t>(at + kStep),
                                 [&](int64_t id, const IdMap::Entry& entry) {
                                   const uint32_t row = source.row_of(id, entry);
                                   visit(id, row, entry.slot());
                                 });
      continue;
    }
    for (int64_t row = at; row < std::min(at + kStep, end); ++row) {
      visit(row, static_cast<uint32_t>(row), ~source.row_slots()[row]);
    }
  }
  copy_records(source, taken);
  return at < end ? at : -1;
}

LeavingIds Engine::leaving_ids(int32_t t, bool at_interval) {
  const auto guard = lock_settled("choosing ids to evict");
  table(t);  // checked
  return evictable_ids(&group_, t, at_interval);
}

LeavingIds Engine::leaving_ids(int32_t t, const std::vector<int64_t>& intervals) {
  bool ends = false;
  {
    const auto guard = lock();
    const int64_t interval = intervals.at(static_cast<size_t>(t));
    ends = interval_ends(table(t), interval);
    if (!has_leaving(t, interval)) return {};
  }
  return leaving_ids(t, ends);
}

}  // namespace rec_sdk
