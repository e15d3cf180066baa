#include "torch_npu_ext/engine/plan/planner.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/base/parallel.h"
#include "torch_npu_ext/engine/lifecycle/timestamps.h"
#include "torch_npu_ext/engine/plan/row_signals.h"
#include "torch_npu_ext/engine/plan/segments.h"

namespace rec_sdk {
namespace {

constexpr int64_t kPrefetchDistance = 32;

template <class Id>
int64_t count_outside(const Id* ids, int64_t count, int64_t rows) {
  int64_t outside = 0;
  for (int64_t i = 0; i < count; ++i) {
    outside += static_cast<uint64_t>(static_cast<int64_t>(ids[i])) >= static_cast<uint64_t>(rows);
  }
  return outside;
}

int64_t first_outside(const IntArray& ids, int64_t begin, int64_t rows) {
  while (ids[begin] >= 0 && ids[begin] < rows) ++begin;
  return ids[begin];
}

int64_t count_outside(const IntArray& ids, int64_t begin, int64_t count, int64_t rows) {
  return ids.wide ? count_outside(static_cast<const int64_t*>(ids.data) + begin, count, rows)
                  : count_outside(static_cast<const int32_t*>(ids.data) + begin, count, rows);
}

// Throws std::invalid_argument if the batch does not have the signals that the rules of its tables require.
void check_signals(const Group& group, const Batch& batch) {
  for (const Batch::Piece& piece : batch.pieces) {
    const TableSpec& table = group.tables[group.features[piece.feature].table].spec();
    if (batch.timestamps == nullptr && table.rules.needs_timestamps()) {
      throw std::invalid_argument("table '" + table.name +
                                  "' evicts ids by their timestamps, and the batch has none: look up a " +
                                  "KeyedJaggedTensorWithTimestamp, or give timestamps=");
    }
    if (batch.clicks == nullptr && table.rules.needs_clicks()) {
      throw std::invalid_argument("table '" + table.name +
                                  "' scores ids by clicks (beta is not 0), and the batch has none: give it " +
                                  "click labels, as docs/admission_eviction.md says");
    }
  }
}

// Advances the clocks of all tables for a batch that is being planned.
void advance_clocks(Group* group, const Batch& batch, PlanBuffers* plan) {
  plan->lifecycle_logs.resize(group->tables.size());
  for (size_t t = 0; t < group->tables.size(); ++t) {
    plan->lifecycle_logs[t].clear();
    plan->lifecycle_logs[t].latest_before = group->tables[t].clock.timestamp;
    plan->lifecycle_logs[t].candidates_added = -group->tables[t].admission->candidates.size();
  }
  for (Table& table : group->tables) table.clock.batches += !table.frozen;
  advance_timestamps(group, batch, plan);
}

// Restores the batches and timestamps of the clocks after a plan was cancelled. Their steps are kept, because
// training steps may have ended since then.
void restore_clocks(Group* group, const PlanBuffers& plan) noexcept {
  for (size_t t = 0; t < group->tables.size(); ++t) {
    group->tables[t].clock.batches -= !group->tables[t].frozen;
    group->tables[t].clock.timestamp = plan.lifecycle_logs[t].latest_before;
  }
}

}  // namespace

void find_bounds_errors(const Group& group, const Batch& batch, std::vector<BoundsError>* errors) {
  errors->clear();
  for (const Batch::Piece& piece : batch.pieces) {
    const int32_t t = group.features[piece.feature].table;
    const TableSpec& table = group.tables[t].spec();
    if (table.hashed) continue;
    const int64_t outside =
        count_outside(batch.values, piece.source, piece.end - piece.begin, table.num_embeddings);
    if (outside == 0) continue;
    if (errors->empty() || errors->back().table != t) {
      errors->push_back({t, 0, first_outside(batch.values, piece.source, table.num_embeddings)});
    }
    errors->back().count += outside;
  }
  for (const BoundsError& error : *errors) {
    const TableSpec& table = group.tables[error.table].spec();
    if (table.bounds_check != BoundsCheck::kFatal) continue;
    throw std::out_of_range("table '" + table.name + "': id " + std::to_string(error.example) +
                            " is out of range for num_embeddings " + std::to_string(table.num_embeddings) +
                            " (" + std::to_string(error.count) +
                            " such ids in the batch); correct the ids, or choose " +
                            "another bounds_check_mode");
  }
}

size_t Planner::arena_bytes(const BatchInput& input, const Group& group) {
  const int64_t features = static_cast<int64_t>(group.features.size());
  check_batch(input, features, true);
  slice_batch(input, features, 0, features * input.batch_size, &batch_);
  PlanShape most = shape(group);
  most.uniques = batch_.lookups;
  most.out = most.in = std::min(batch_.lookups, group.slots);
  // More rows may have sums by the time the batch is planned.
  most.window_out = most.out;
  most.window_in = most.in;
  return PlanBuffers::arena_bytes(most);
}

PlanShape Planner::shape(const Group& group) const {
  PlanShape shape;
  shape.lookups = batch_.lookups;
  shape.bags = batch_.bags;
  shape.tables = static_cast<int64_t>(group.tables.size());
  shape.pooled = group.pooled;
  shape.scaled = group.scaled;
  shape.weighted = batch_.weighted;
  shape.sources = group.sources && !batch_.joined;
  shape.ids = group.row_ids;
  shape.origins = group.origins;
  return shape;
}

// An id out of range of an index table counts as a use of row 0, as in a plan.
uint64_t Planner::announce(const BatchInput& input, Group* group) {
  const int64_t features = static_cast<int64_t>(group->features.size());
  check_batch(input, features, true);
  slice_batch(input, features, 0, features * input.batch_size, &batch_);
  const uint64_t ticket = group->future.begin();
  for (const Batch::Piece& piece : batch_.pieces) {
    const int32_t t = group->features[piece.feature].table;
    const Table& table = group->tables[t];
    if (table.never_evicts()) continue;
    const int64_t end = piece.source + piece.end - piece.begin;
    for (int64_t i = piece.source; i < end; ++i) {
      if (i + kPrefetchDistance < end) {
        table.prefetch_slot(table.known_id(batch_.values[i + kPrefetchDistance]));
      }
      const int64_t id = table.known_id(batch_.values[i]);
      const uint32_t slot = table.slot_of(id);
      if (slot != kNoSlot) {
        group->future.add(slot);
      } else {
        group->future.add_absent(t, id);
      }
    }
  }
  group->future.confirm();
  return ticket;
}

void Planner::plan(const BatchInput& input, Group* group, const std::shared_ptr<PlanBuffers>& plan,
                   ExternalArena arena, uint64_t announced) {
  const int64_t features = static_cast<int64_t>(group->features.size());
  const int32_t tables = static_cast<int32_t>(group->tables.size());
  check_batch(input, features, true);
  slice_batch(input, features, 0, features * input.batch_size, &batch_);
  check_signals(*group, batch_);
  find_bounds_errors(*group, batch_, &plan->bounds_errors);
  plan->table_lookups.assign(group->tables.size(), 0);
  plan->table_new_rows.assign(group->tables.size(), 0);
  for (const Batch::Piece& piece : batch_.pieces) {
    plan->table_lookups[group->features[piece.feature].table] += piece.end - piece.begin;
  }
  plan->rows_before.clear();
  plan->slots_before.clear();
  for (const Table& table : group->tables) {
    plan->rows_before.push_back(table.row_bound());
    plan->slots_before.push_back(table.slot_bound());
  }
  group->uses.begin_batch(batch_.lookups);
  scan_.begin(group, batch_);
  advance_clocks(group, batch_, plan.get());
  try {
    scan_.run(group, batch_, &plan->lifecycle_logs);
    for (int32_t t = 0; t < tables; ++t) check_slots(group, t);
    reserve(input, group, plan.get(), std::move(arena));
  } catch (...) {
    scan_.rollback(group);
    restore_clocks(group, *plan);
    throw;
  }
  group->future.forget(announced);
  commit(group, plan.get());
  group->uses.hold(plan.get());
  if (plan->rows_out > 0) group->write_backs.add(plan);
  column_updates_.touch(group, plan.get());
  count(group, *plan, 1);
}

// Throws CacheTooSmallError if there are too few slots for the batch. Rows of batches in flight and rows of
// this batch must not be victims.
void Planner::check_slots(Group* group, int32_t t) {
  const Table& table = group->tables[t];
  const int64_t uniques = scan_.unique_count(t);
  const int64_t slots = table.spec().slots;
  if (evictions(table, t) == 0 || uniques + group->uses.held_at_most(t) <= slots) return;
  group->uses.mark_held();
  const int64_t held = group->uses.marked_count(t);
  int64_t held_and_used = 0;
  scan_.for_each_unique(t, [&](const UniqueRow& row) {
    held_and_used += row.key < static_cast<RowKey>(group->slots) && group->uses.marked(row.key);
  });
  if (uniques + held - held_and_used <= slots) return;
  throw CacheTooSmallError(
      "table '" + table.spec().name + "': this batch needs " + std::to_string(uniques) +
      " distinct rows in the device cache, which has " + std::to_string(slots) + " slots (" +
      std::to_string(held) +
      " pinned by batches in flight); enlarge it with cache=..., or use a smaller batch");
}

int64_t Planner::evictions(const Table& table, int32_t t) const {
  return std::max<int64_t>(0, scan_.missing(t).size() - table.free_slots());
}

// Allocates all memory that commit() and the swap of the plan may need, and counts the plan's rows.
void Planner::reserve(const BatchInput& input, Group* group, PlanBuffers* plan, ExternalArena arena) {
  const size_t tables = group->tables.size();
  plan->table_offsets.assign(tables + 1, 0);
  plan->out_offsets.assign(tables + 1, 0);
  plan->in_offsets.assign(tables + 1, 0);
  for (size_t t = 0; t < tables; ++t) {
    Table& table = group->tables[t];
    const int32_t number = static_cast<int32_t>(t);
    const int64_t out = evictions(table, number), missed = scan_.missing(number).size();
    plan->table_offsets[t + 1] = plan->table_offsets[t] + static_cast<int32_t>(scan_.unique_count(number));
    plan->out_offsets[t + 1] = plan->out_offsets[t] + static_cast<int32_t>(out);
    plan->in_offsets[t + 1] = plan->in_offsets[t] + static_cast<int32_t>(missed);
    if (missed == 0) continue;
    table.extend_rows();  // the map already contains the added ids
    if (group->future.any()) group->future.reserve(number, out);
    if (table.store.on_disk()) continue;  // extend_rows() reserved the space on disk
    const int64_t unwritten = table.rows() - table.store.written_rows();
    group->memory.require(saturated_product(std::min(out, unwritten), group->layout.bytes),
                          table.spec().name);
  }
  PlanShape exact = shape(*group);
  exact.uniques = plan->table_offsets[tables];
  exact.out = plan->out_offsets[tables];
  exact.in = plan->in_offsets[tables];
  const Window::Bound moved = group->window.bound(exact.out, exact.in);
  exact.window_out = moved.out;
  exact.window_in = moved.in;
  plan->layout(exact, std::move(arena));
  group->window.reserve(moved, plan);
  plan->sources.clear();
  if (exact.in > 0 || exact.out > 0) group->write_backs.prepare(exact.in > 0);
  plan->sources.reserve(group->write_backs.size());
  plan->late.clear();
  if (!group->write_backs.empty()) plan->late.reserve(static_cast<size_t>(exact.in));
  if (exact.out > 0) group->uses.prepare_held();
  list_runs(*group, scan_, *plan, &runs_);
  column_updates_.reserve(group, batch_, runs_, plan);
  if (group->pooled) write_offsets(input, batch_, plan->offsets);
}

void Planner::commit(Group* group, PlanBuffers* plan) noexcept {
  const int32_t tables = static_cast<int32_t>(group->tables.size());
  std::copy(plan->table_offsets.begin(), plan->table_offsets.end(), plan->device_table_offsets);
  if (plan->rows_in > 0) {
    for_each_part(tables, batch_.lookups,
                  [&](int64_t t) noexcept { swap_table(group, static_cast<int32_t>(t), plan); });
    if (!group->write_backs.empty()) group->write_backs.find_sources(plan);
    count_new(*group, plan);
  }
  clear_hot_segments(plan->hot_segments, plan->lookups);
  for_each_part(scan_.share_count(), batch_.lookups,
                [&](int64_t s) noexcept { write_segments(*group, batch_, s, &scan_, plan); });
  if (plan->origins != nullptr) write_origins(group, plan);
  plan->segment_offsets[plan->uniques] = static_cast<int32_t>(scan_.segment_lookups());
  plan->hot = collect_hot_segments(plan->hot_segments, plan->lookups);
  for (int32_t t = 0; t < tables; ++t) {
    plan->lifecycle_logs[t].default_lookups = scan_.default_lookups(t);
    plan->lifecycle_logs[t].candidates_added += group->tables[t].admission->candidates.size();
  }
  for (int32_t t = 0; t < tables; ++t) touch(group, t, *plan);
  if (column_updates_.signals()->any()) {
    for_each_part(scan_.share_count(), batch_.lookups, [&](int64_t s) noexcept {
      sum_row_signals(*group, batch_, s, scan_, column_updates_.signals());
    });
  }
  if (!group->window.empty()) group->window.move(plan);
}

void Planner::swap_table(Group* group, int32_t t, PlanBuffers* plan) noexcept {
  if (plan->out_offsets[t] < plan->out_offsets[t + 1]) swap_out(group, t, plan);
  if (plan->in_offsets[t] < plan->in_offsets[t + 1]) swap_in(group, t, plan);
}

void Planner::touch(Group* group, int32_t t, const PlanBuffers& plan) noexcept {
  const Table& table = group->tables[t];
  if (table.never_evicts()) return;
  const int32_t begin = plan.table_offsets[t];
  const uint32_t* slots = reinterpret_cast<const uint32_t*>(plan.unique_slots);
  table.policy->touch(slots + begin, plan.table_offsets[t + 1] - begin);
}

void Planner::swap_out(Group* group, int32_t t, PlanBuffers* plan) noexcept {
  Table& table = group->tables[t];
  const int32_t begin = plan->out_offsets[t], end = plan->out_offsets[t + 1];
  int32_t* const victims = plan->swap_out_slots;
  table.policy->evict(end - begin, &group->uses, group->future, reinterpret_cast<uint32_t*>(victims + begin));
  for (int32_t i = begin; i < end; ++i) {
    if (i + 2 * kPrefetchDistance < end) prefetch(&group->slot_ids[victims[i + 2 * kPrefetchDistance]]);
    if (i + kPrefetchDistance < end) table.prefetch_slot(group->slot_ids[victims[i + kPrefetchDistance]]);
    const int64_t id = group->slot_ids[victims[i]];
    const uint32_t row = table.row_in(static_cast<uint32_t>(victims[i]), id);
    table.clear_slot(id, row);
    plan->swap_out_rows[i] = row;
    plan->swap_out_ids[i] = id;
  }
  remove_rows(group, t, victims, plan->swap_out_rows, plan->swap_out_ids, begin, end);
}

void Planner::swap_in(Group* group, int32_t t, PlanBuffers* plan) noexcept {
  Table& table = group->tables[t];
  const int32_t begin = plan->in_offsets[t], end = plan->in_offsets[t + 1], count = end - begin;
  const Miss* const misses = &scan_.misses[scan_.missing(t).begin];
  int32_t* const slots = plan->swap_in_slots + begin;
  const int32_t evicted = plan->out_offsets[t + 1] - plan->out_offsets[t];
  for (int32_t i = 0; i < count - evicted; ++i)
    slots[i] = static_cast<int32_t>(table.take_slot());  // these slots are the keys that the scan assigned
  std::copy_n(plan->swap_out_slots + plan->out_offsets[t], evicted, slots + count - evicted);
  if (int32_t* const places = plan->swap_out_places; places != nullptr) {
    std::fill_n(places + begin, count - evicted, -1);
    std::iota(places + end - evicted, places + end, plan->out_offsets[t]);
  }
  for (int32_t i = count - evicted; i < count; ++i) {
    if (i + kPrefetchDistance < count) table.prefetch_slot(misses[i + kPrefetchDistance].id);
    table.set_slot(misses[i].id, static_cast<uint32_t>(slots[i]));
    group->uses.touch(slots[i]);
  }
  int64_t* const slot_ids = group->slot_ids.data();
  uint32_t* const rows = plan->swap_in_rows + begin;
  int64_t* const ids = plan->swap_in_ids + begin;
  uint8_t* const added =
      plan->swap_in_added +
      begin;  // written in a separate loop, because bytes may alias what the first loop reads
  for (int32_t i = 0; i < count; ++i) {
    const Miss miss = misses[i];
    slot_ids[slots[i]] = miss.id;
    table.keep_row(static_cast<uint32_t>(slots[i]), miss.row);
    rows[i] = miss.row;
    ids[i] = miss.id;
  }
  for (int32_t i = 0; i < count; ++i) added[i] = misses[i].added ? 1 : 0;
  insert_rows(group, t, plan->swap_in_slots, plan->swap_in_rows, plan->swap_in_ids, begin, end);
}

// remove_rows() tells the policy and the future uses that rows [begin, end) leave their slots; insert_rows()
// is its inverse.
void Planner::remove_rows(Group* group, int32_t t, const int32_t* slots, const uint32_t* rows,
                          const int64_t* ids, int32_t begin, int32_t end) noexcept {
  group->tables[t].policy->remove(reinterpret_cast<const uint32_t*>(slots) + begin, rows + begin,
                                  end - begin);
  if (!group->future.any()) return;
  for (int32_t i = begin; i < end; ++i) group->future.remove(t, slots[i], ids[i]);
}

void Planner::insert_rows(Group* group, int32_t t, const int32_t* slots, const uint32_t* rows,
                          const int64_t* ids, int32_t begin, int32_t end) noexcept {
  group->tables[t].policy->insert(reinterpret_cast<const uint32_t*>(slots) + begin, rows + begin,
                                  end - begin);
  if (!group->future.any()) return;
  for (int32_t i = begin; i < end; ++i) group->future.insert(t, slots[i], ids[i]);
}

void Planner::cancel(PlanBuffers* plan, Group* group) noexcept {
  group->uses.release(*plan);
  group->write_backs.remove(*plan);
  count(group, *plan, -1);
  ColumnUpdates::undo(group, *plan);
  for (size_t t = 0; t < group->tables.size(); ++t) {
    cancel_table(plan, group, static_cast<int32_t>(t));
    group->tables[t].admission->undo(plan->lifecycle_logs[t]);
  }
  restore_clocks(group, *plan);
  group->window.undo(plan);
}

void Planner::finish(const PlanBuffers& plan, Group* group) noexcept {
  group->window.finish(plan);
  for (const BoundsError& error : plan.bounds_errors) {
    group->stats[error.table].bounds_errors += error.count;
  }
  for (size_t t = 0; t < group->tables.size(); ++t) {
    int64_t& largest = group->stats[t].largest_batch;
    largest = std::max<int64_t>(largest, plan.table_offsets[t + 1] - plan.table_offsets[t]);
  }
}

void Planner::cancel_table(PlanBuffers* plan, Group* group, int32_t t) noexcept {
  Table& table = group->tables[t];
  const int32_t in_begin = plan->in_offsets[t];
  const int32_t out_begin = plan->out_offsets[t];
  remove_rows(group, t, plan->swap_in_slots, plan->swap_in_rows, plan->swap_in_ids, in_begin,
              plan->in_offsets[t + 1]);
  for (int32_t m = plan->in_offsets[t + 1]; m-- > in_begin;) {
    const int64_t id = plan->swap_in_ids[m];
    if (plan->swap_in_added[m] != 0) {
      table.forget_row(plan->swap_in_rows[m]);
      table.directory().undo_add(id, plan->swap_in_rows[m], plan->rows_before[t]);
    } else {
      table.clear_slot(id, plan->swap_in_rows[m]);
    }
  }
  for (int32_t o = out_begin; o < plan->out_offsets[t + 1]; ++o) {
    const int32_t slot = plan->swap_out_slots[o];
    const int64_t id = plan->swap_out_ids[o];
    table.set_slot(id, static_cast<uint32_t>(slot));
    table.keep_row(static_cast<uint32_t>(slot), plan->swap_out_rows[o]);
    group->slot_ids[slot] = id;
  }
  insert_rows(group, t, plan->swap_out_slots, plan->swap_out_rows, plan->swap_out_ids, out_begin,
              plan->out_offsets[t + 1]);
  // The first rows in took free slots, and the other rows in took the slots of victims. Only the former slots
  // become free again.
  const int32_t victims = plan->out_offsets[t + 1] - out_begin;
  for (int32_t m = plan->in_offsets[t + 1] - victims; m-- > in_begin;) {
    group->uses.forget(plan->swap_in_slots[m]);
    table.put_back_slot(static_cast<uint32_t>(plan->swap_in_slots[m]), plan->slots_before[t]);
  }
}

// Counts the new rows: rows in that have a record neither in the host store nor in a pending write-back.
void Planner::count_new(const Group& group, PlanBuffers* plan) noexcept {
  for (int32_t t = 0; t < static_cast<int32_t>(group.tables.size()); ++t) {
    const HostStore& store = group.tables[t].store;
    for (int32_t i = plan->in_offsets[t]; i < plan->in_offsets[t + 1]; ++i) {
      const uint32_t row = plan->swap_in_rows[i];
      if (plan->swap_in_added[i] != 0) {
        ++plan->table_new_rows[t];
      } else if (!store.has(row)) {
        plan->table_new_rows[t] += plan->sources.empty() || group.write_backs.serial_of(t, row) == 0;
      }
    }
  }
}

void Planner::count(Group* group, const PlanBuffers& plan, int64_t sign) noexcept {
  for (size_t t = 0; t < group->tables.size(); ++t) {
    Stats& stats = group->stats[t];
    const int64_t in = plan.in_offsets[t + 1] - plan.in_offsets[t];
    const int64_t out = plan.out_offsets[t + 1] - plan.out_offsets[t];
    stats.batches += sign;
    stats.lookups += sign * plan.table_lookups[t];
    stats.unique_rows += sign * (plan.table_offsets[t + 1] - plan.table_offsets[t]);
    stats.unique_misses += sign * in;
    stats.rows_in += sign * in;
    stats.rows_out += sign * out;
    stats.bytes_in += sign * in * group->layout.bytes;
    stats.bytes_out += sign * out * group->layout.bytes;
    stats.new_rows += sign * plan.table_new_rows[t];
    stats.admitted += sign * static_cast<int64_t>(plan.lifecycle_logs[t].admitted.size());
    stats.default_lookups += sign * plan.lifecycle_logs[t].default_lookups;
  }
}

}  // namespace rec_sdk
