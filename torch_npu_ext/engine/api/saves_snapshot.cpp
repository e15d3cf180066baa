// The engine's calls on snapshots, with which a save takes the rows as of one moment while batches are
// planned and applied.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "torch_npu_ext/engine/api/saves.h"
#include "torch_npu_ext/engine/base/radix_sort.h"

namespace rec_sdk {
namespace {

Snapshot& open_snapshot_of(Table& table) {
  if (table.snapshot == nullptr) {
    throw std::runtime_error("table '" + table.spec().name + "' has no snapshot");
  }
  if (table.snapshot->failed()) {
    throw std::runtime_error("table '" + table.spec().name +
                             "': out of memory for the columns that a snapshot keeps");
  }
  return *table.snapshot;
}

TakenRows empty_result(const Table& source, int64_t record_bytes) {
  TakenRows taken;
  taken.kept = source.spec().columns;
  taken.record_bytes = record_bytes;
  return taken;
}

// Calls visit(id, row, slot) for the ids that the table has. For prefetches, soon(row) is called earlier.
// Each kind of memory access is prefetched for all ids of a piece before it is made for the first of them.
template <class Soon, class Visit>
void for_each_located(const Table& table, Span<int64_t> all, const Soon& soon, const Visit& visit) {
  constexpr int64_t kPiece = 64;
  IdMap::Entry entries[kPiece];
  uint32_t rows[kPiece], slots[kPiece];
  for (const int64_t* ids = all.begin(); ids < all.end(); ids += kPiece) {
    const int64_t count = std::min<int64_t>(kPiece, all.end() - ids);
    for (int64_t i = 0; i < count; ++i) table.prefetch_slot(ids[i]);
    if (table.spec().hashed) {
      for (int64_t i = 0; i < count; ++i) {
        entries[i] = table.map().find(ids[i], IdMap::hash(ids[i]));
        if (entries[i] && entries[i].has_slot()) table.prefetch_row(entries[i].slot());
      }
    }
    int64_t found = 0;
    int64_t known[kPiece];
    for (int64_t i = 0; i < count; ++i) {
      if (table.spec().hashed) {
        if (!entries[i]) continue;
        rows[found] = table.row_of(ids[i], entries[i]);
        slots[found] = entries[i].slot();
      } else if (!table.locate(ids[i], &rows[found], &slots[found])) {
        continue;
      }
      known[found] = ids[i];
      if (!table.columns.empty()) prefetch_near(table.columns.record(rows[found]));
      soon(rows[found++]);
    }
    for (int64_t i = 0; i < found; ++i) visit(known[i], rows[i], slots[i]);
  }
}

}  // namespace

template <class Fill>
int64_t Saves::open(int32_t t, const Fill& fill) {
  const auto guard = lock_settled("a snapshot");
  Table& target = table(t);
  if (target.snapshot != nullptr) {
    throw std::runtime_error("table '" + target.spec().name + "' has a snapshot already");
  }
  auto snapshot = std::make_unique<Snapshot>(target.row_bound());
  if (target.spec().hashed) target.directory().for_each_free([&](uint32_t row) { snapshot->forget(row); });
  fill(&target, snapshot.get());
  target.snapshot = std::move(snapshot);
  return target.snapshot->pending();
}

int64_t Saves::open_snapshot(int32_t t) {
  return open(t, [](Table* target, Snapshot* snapshot) {
    snapshot->add_all();
    if (!target->spec().hashed) return;
    target->directory().for_each_free([&](uint32_t row) { snapshot->exclude(row); });
  });
}

int64_t Saves::open_snapshot(int32_t t, Span<int64_t> ids) {
  return open(t, [&](Table* target, Snapshot* snapshot) {
    for_each_located(
        *target, ids, [](uint32_t) {}, [&](int64_t, uint32_t row, uint32_t) { snapshot->add(row); });
  });
}

int64_t Saves::open_snapshot_since(int32_t t, uint64_t since) {
  return open(t, [&](Table* target, Snapshot* snapshot) {
    versioned_table(t);  // throws unless the table keeps versions
    snapshot->has_list = true;
    const auto add = [&](int64_t id, uint32_t row, uint32_t) {
      if (target->columns.version(row) <= since || snapshot->has(row)) return;
      snapshot->listed.emplace_back(row, id);
      snapshot->add(row);
    };
    if (!target->changes.knows(since)) return target->for_each(add);
    constexpr int64_t kAhead = 48;
    const auto [ids, rows, count] = target->changes.entries_after(since);
    snapshot->listed.reserve(static_cast<size_t>(count));
    for (int64_t i = count; i-- > 0;) {  // newest first: the newest entry of a row has its present id
      if (i >= kAhead) {
        prefetch(target->columns.record(rows[i - kAhead]));
        snapshot->prefetch(rows[i - kAhead]);
      }
      add(ids[i], rows[i], kNoSlot);  // the version of a free row is 0
    }
  });
}

void Saves::close_snapshot(int32_t t) {
  const auto guard = lock();
  table(t).snapshot.reset();
}

int64_t Saves::snapshot_pending(int32_t t) {
  const auto guard = lock();
  return open_snapshot_of(table(t)).pending();
}

// Visits the moving rows: rows that an unapplied plan swaps in or out, and rows of pending write-backs.
template <class Visit>
void Saves::for_each_moving_row(int32_t t, const Visit& visit) const {
  const auto all = [&visit, t](const std::vector<int32_t>& offsets, const uint32_t* rows) {
    std::for_each(rows + offsets[t], rows + offsets[t + 1], visit);
  };
  order_.for_each([&all](const std::shared_ptr<PlanBuffers>& plan) {
    all(plan->in_offsets, plan->swap_in_rows);
    all(plan->out_offsets, plan->swap_out_rows);
  });
  group_.write_backs.for_each([&all](const PlanBuffers& plan) { all(plan.out_offsets, plan.swap_out_rows); });
}

void Saves::mark_moving(int32_t t, Snapshot* snapshot) const {
  std::vector<uint64_t> plans;  // identifies the set of moving rows, because the rows of each plan are fixed
  order_.for_each([&](const std::shared_ptr<PlanBuffers>& plan) { plans.push_back(plan->serial << 1); });
  group_.write_backs.for_each([&plans](const PlanBuffers& plan) { plans.push_back(plan.serial << 1 | 1); });
  snapshot->set_moving(std::move(plans), [&](const auto& mark) { for_each_moving_row(t, mark); });
}

void Saves::take(Table* source, int64_t id, uint32_t row, uint32_t slot, TakenRows* taken) {
  taken->ids.push_back(id);
  taken->slots.push_back(static_cast<int32_t>(slot));
  taken->rows.push_back(row);
  if (source->columns.saved()) {
    taken->columns.push_back(source->snapshot->take(row, source->columns));
  } else {
    source->snapshot->take(row);
  }
}

// Copies the records of the taken rows that are not cached. This is done for all rows together, with
// prefetches, because they are scattered in the store.
void Saves::copy_records(const Table& source, TakenRows* taken) const {
  constexpr size_t kAhead = 8;
  const size_t bytes = static_cast<size_t>(group_.layout.bytes), count = taken->ids.size();
  const auto resident = [](int32_t slot) { return static_cast<uint32_t>(slot) != kNoSlot; };
  if (std::all_of(taken->slots.begin(), taken->slots.end(), resident)) return;
  taken->records.resize(count * bytes);
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) source.store.prefetch(taken->rows[i + kAhead]);
    if (resident(taken->slots[i])) continue;  // the caller reads the record from the cache
    char* const record = taken->records.data() + i * bytes;
    if (!source.store.read(taken->rows[i], record)) source.initializer.write(taken->ids[i], record);
  }
}

TakenRows Saves::take_ids(int32_t t, Span<int64_t> ids) {
  const auto guard = lock();
  Table& source = table(t);
  TakenRows taken = empty_result(source, group_.layout.bytes);
  Snapshot& snapshot = open_snapshot_of(source);
  mark_moving(t, &snapshot);
  const auto soon = [&](uint32_t row) { snapshot.prefetch(row); };
  for_each_located(source, ids, soon, [&](int64_t id, uint32_t row, uint32_t slot) {
    if (snapshot.is_takable(row)) take(&source, id, row, slot, &taken);
  });
  copy_records(source, &taken);
  return taken;
}

TakenRows Saves::take_slots(int32_t t, Span<int32_t> slots) {
  constexpr int64_t kAhead = 16;
  const auto guard = lock();
  Table& source = table(t);
  const Snapshot& snapshot = open_snapshot_of(source);
  const auto own = [&](int32_t slot) {
    return slot >= source.first_slot() && slot < source.first_slot() + source.spec().slots;
  };
  TakenRows taken = empty_result(source, group_.layout.bytes);
  if (snapshot.pending() == 0) return taken;
  taken.reserve(static_cast<size_t>(std::min(slots.size(), snapshot.pending())), source.columns.saved());
  for (int64_t i = 0; i < slots.size(); ++i) {
    if (i + kAhead < slots.size() && own(slots[i + kAhead])) {
      source.prefetch_row(static_cast<uint32_t>(slots[i + kAhead]));
      prefetch(&group_.slot_ids[slots[i + kAhead]]);
    }
    const int32_t slot = slots[i];
    if (!own(slot)) continue;
    const int64_t id = group_.slot_ids[slot];
    const uint32_t row = source.row_in(static_cast<uint32_t>(slot), id);
    if (snapshot.has(row)) take(&source, id, row, static_cast<uint32_t>(slot), &taken);
  }
  copy_records(source, &taken);
  return taken;
}

// Takes rows of the snapshot's list, from position *at on, and advances *at. Moving rows are skipped.
void Saves::take_listed(Table* source, int64_t* at, int64_t least, TakenRows* taken) {
  constexpr int64_t kAhead = 16;
  Snapshot& snapshot = *source->snapshot;
  auto& listed = snapshot.listed;
  if (!snapshot.is_sorted) {
    radix_sort(&listed, [](const auto& row_and_id) -> uint64_t { return row_and_id.first; });
    snapshot.is_sorted = true;
  }
  const int64_t end = static_cast<int64_t>(listed.size());
  uint32_t row = 0, slot = 0;
  for (; *at < end && static_cast<int64_t>(taken->ids.size()) < least; ++*at) {
    if (*at + kAhead < end) source->prefetch_slot(listed[static_cast<size_t>(*at + kAhead)].second);
    const auto& [of_moment, id] = listed[static_cast<size_t>(*at)];
    if (!snapshot.is_takable(of_moment) || !source->locate(id, &row, &slot)) continue;
    if (row == of_moment) take(source, id, row, slot, taken);
  }
}

std::pair<TakenRows, int64_t> Saves::take_next(int32_t t, int64_t begin, int64_t least) {
  constexpr int64_t kStep = 256;  // buckets of a hash table, or rows of an index table
  const auto guard = lock();
  Table& source = table(t);
  Snapshot& snapshot = open_snapshot_of(source);
  mark_moving(t, &snapshot);
  const bool hashed = source.spec().hashed;
  const int64_t end = snapshot.has_list ? static_cast<int64_t>(snapshot.listed.size())
                      : hashed          ? static_cast<int64_t>(source.map().bucket_count())
                                        : source.spec().num_embeddings;
  TakenRows taken = empty_result(source, group_.layout.bytes);
  taken.reserve(static_cast<size_t>(std::min(least, snapshot.pending())), source.columns.saved());
  const auto visit = [&](int64_t id, uint32_t row, uint32_t slot) {
    if (snapshot.is_takable(row)) take(&source, id, row, slot, &taken);
  };
  int64_t at = std::max<int64_t>(begin, 0);
  if (snapshot.has_list) take_listed(&source, &at, least, &taken);
  for (; at < end && static_cast<int64_t>(taken.ids.size()) < least; at += kStep) {
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
  copy_records(source, &taken);
  return {std::move(taken), at < end ? at : -1};
}

}  // namespace rec_sdk
