#include "torch_npu_ext/engine/group/table.h"

#include <algorithm>
#include <stdexcept>

#include "torch_npu_ext/engine/base/errors.h"

namespace rec_sdk {
namespace {

void check_spec(const TableSpec& spec, const RecordLayout& layout) {
  const std::string table = "table '" + spec.name + "': ";
  const auto check = [&table](bool valid, const std::string& message) {
    if (!valid) throw std::invalid_argument(table + message);
  };
  check(spec.num_embeddings >= 1,
        "num_embeddings must be at least 1, got " + std::to_string(spec.num_embeddings));
  check(spec.hashed || spec.num_embeddings <= kMaxRows,
        "an index table may have at most 2^32 - 2 rows, got " + std::to_string(spec.num_embeddings));
  check(spec.slots >= 1, "slots must be at least 1, got " + std::to_string(spec.slots));
  check(spec.capacity >= 0, "capacity must be 0 (unlimited) or more, got " + std::to_string(spec.capacity));
  check(static_cast<int64_t>(spec.state_init.size()) == layout.state_count,
        "state_init must have one value per state block, " + std::to_string(layout.state_count) + ", got " +
            std::to_string(spec.state_init.size()));
  check(!spec.rules.any() || spec.hashed,
        "only a hash table admits or evicts ids, and this is an index table");
  check(spec.rules.admission() == nullptr || spec.default_row, "a table that admits ids needs a default row");
  check(spec.columns.has(spec.rules.columns()), "its rules require columns that it does not keep");
  check(spec.rules.score() != nullptr || !spec.columns.has(Column::kScore),
        "the column 'score' needs the rule 'score'");
}

std::unique_ptr<StoreFile> make_file(const TableSpec& spec) {
  return spec.store_path.empty() ? nullptr : std::make_unique<StoreFile>(spec.store_path, spec.name);
}

}  // namespace

// The id map doubles while the rows still fit into the cache, up to 64 MiB; so few ids move while it fills.
Table::Table(TableSpec spec, const RecordLayout& layout, const std::string& policy_name, int64_t first_slot,
             MemoryGuard* memory)
    : store(StoredRecords(layout, spec.stored_dtype), memory, make_file((check_spec(spec, layout), spec))),
      initializer(layout, spec.initializer, spec.seed, spec.name, spec.state_init, spec.stored_dtype),
      policy(make_cache_policy(policy_name, first_slot, spec.slots)),
      columns(spec.columns),
      spec_(std::move(spec)),
      first_slot_(first_slot),
      memory_(memory),
      directory_(spec_.hashed ? std::min<int64_t>(spec_.slots, int64_t{3} << 20) : 0),
      slot_rows_(spec_.hashed ? static_cast<size_t>(spec_.slots) : 0),
      row_slots_(make_row_slots()) {
  prepare();
  const AdmissionRule* const rule = spec_.rules.admission();
  const bool wide = spec_.rules.needs_clicks() || spec_.rules.needs_timestamps();
  admission =
      rule == nullptr ? std::make_unique<Admission>() : rule->make({spec_.name, spec_.seed, wide, memory_});
}

HugeArray<uint32_t> Table::make_row_slots() const {
  const size_t rows = spec_.hashed ? 0 : static_cast<size_t>(spec_.num_embeddings);
  return HugeArray<uint32_t>(rows, pages_of_array(rows * sizeof(uint32_t)));
}

void Table::prepare() {
  used_slots_.reserve(spec_.slots);
  if (!spec_.hashed) extend_rows();
}

bool Table::never_evicts() const {
  const int64_t most = spec_.hashed ? spec_.capacity : spec_.num_embeddings;
  return most > 0 && spec_.slots >= most;
}

int64_t Table::index_bytes() const {
  if (!spec_.hashed) return static_cast<int64_t>(row_slots_.size() * sizeof(uint32_t));
  return directory_.bytes();
}

int64_t Table::column_bytes() const {
  const size_t removed = removals.removed.capacity() * sizeof(removals.removed[0]);
  return columns.bytes(row_bound()) + changes.bytes() + static_cast<int64_t>(removed);
}

bool Table::reserve_ids(int64_t extra) {
  const int64_t bytes = directory_.growth(extra);
  if (bytes == 0) {
    const bool moves = directory_.grows();
    if (moves) directory_.reserve(extra);
    return moves;
  }
  const auto growth = memory_->one_at_a_time();
  memory_->require(bytes, spec_.name);
  directory_.reserve(extra);
  return true;
}

void Table::check_capacity(int64_t rows_after, int64_t id) const {
  const int64_t capacity = spec_.capacity > 0 ? spec_.capacity : int64_t{kMaxRows};
  if (rows_after <= capacity) return;
  throw CapacityError("table '" + spec_.name + "' is full: its capacity is " + std::to_string(capacity) +
                      " ids, and id " + std::to_string(id) + " would be one more; raise num_embeddings");
}

void Table::extend_rows() {
  const int64_t rows = row_bound();
  store.extend(rows);
  columns.extend(rows);
  if (spec_.hashed) directory_.reserve_removal();
}

void Table::begin_row(uint32_t row) noexcept {
  RowColumnValues values = columns.read(row);
  values.last_use = static_cast<uint32_t>(clock.batches);
  values.timestamp = clock.timestamp;
  columns.write(row, values);
}

void Table::forget_row(uint32_t row) noexcept {
  store.forget(row);
  columns.reset(row);
  if (snapshot != nullptr) snapshot->forget(row);
}

void Table::clear() {
  if (snapshot != nullptr) snapshot->forget_all();
  if (spec_.hashed) {
    directory_.clear();
  } else {
    row_slots_ = make_row_slots();
  }
  store.clear();
  if (spec_.hashed) store.shrink();  // an index table needs its disk space again
  columns.clear();
  admission->clear();
  policy->clear();
  used_slots_.clear();
  prepare();
}

}  // namespace rec_sdk
