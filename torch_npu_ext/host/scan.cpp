#include "torch_npu_ext/host/scan.h"

#include <algorithm>

#include "torch_npu_ext/host/parallel.h"

namespace rec_sdk {
namespace {

// A lookup is a pipeline: hash and prefetch its entry, later probe and prefetch its stamp, later number its
// row. Evenly spaced misses of the processor's cache overlap; issued in blocks they queue up.
constexpr int64_t kEntryDistance = 48;
constexpr int64_t kStampDistance = 32;
constexpr int64_t kRing = 64;  // more than either distance; a power of two

// Numbers the rows of a table that are not resident: by a slot that no row has had yet, or else by a key
// beyond the slots.
class MissList {
 public:
  // `first` is the place of the table's first one among all misses.
  MissList(const Table& table, int64_t slots, Miss* misses, int64_t first, int64_t* count)
      : misses_(misses + first),
        count_(count),
        next_slot_(static_cast<RowKey>(table.first_slot() + table.used_slots)),
        end_slot_(static_cast<RowKey>(table.end_slot())),
        beyond_(static_cast<RowKey>(slots + first)) {}

  RowKey add(int64_t id, uint32_t row, bool added) {
    misses_[*count_] = {id, row, added};
    const RowKey key = next_slot_ < end_slot_ ? next_slot_++ : beyond_ + static_cast<RowKey>(*count_);
    ++*count_;
    return key;
  }

 private:
  Miss* misses_;
  int64_t* count_;
  RowKey next_slot_, end_slot_, beyond_;
};

// How an id is found, for hash and for index tables. prepare() prefetches its place, which is void once
// reserve() has said that the places moved; key() marks a missing row.
class HashDirectory {
 public:
  HashDirectory(Table* table, MissList misses)
      : table_(table), map_(&table->map()), misses_(misses), next_row_(table->rows()) {}

  using Place = IdMap::Bucket*;

  bool reserve(int64_t extra) { return table_->reserve_ids(extra); }

  REC_SDK_ALWAYS_INLINE Place prepare(int64_t id) const {
    const Place home = map_->home_of(IdMap::hash(id));
    prefetch_write(home);
    return home;
  }

  REC_SDK_ALWAYS_INLINE RowKey key(int64_t id, Place home) {
    bool added = false;
    const IdMap::Entry entry = map_->find_or_add(id, home, static_cast<uint32_t>(next_row_), &added);
    if (__builtin_expect(*entry.slot == kNoSlot, 0)) add_miss(entry, id, added);
    return *entry.slot;
  }

 private:
  void add_miss(const IdMap::Entry& entry, int64_t id, bool added) {
    *entry.slot = misses_.add(id, entry.row, added);
    if (added) table_->check_capacity(++next_row_, id);
  }

  Table* table_;
  IdMap* map_;
  MissList misses_;
  int64_t next_row_;
};

class IndexDirectory {
 public:
  IndexDirectory(Table* table, MissList misses)
      : row_slots_(table->row_slots()),
        rows_(static_cast<uint64_t>(table->spec().num_embeddings)),
        misses_(misses) {}

  using Place = uint64_t;

  bool reserve(int64_t) { return false; }

  // Ids out of range are counted before the scan; here they become 0.
  REC_SDK_ALWAYS_INLINE Place prepare(int64_t id) const {
    const uint64_t row = static_cast<uint64_t>(id) < rows_ ? static_cast<uint64_t>(id) : 0;
    prefetch_write(&row_slots_[row]);
    return row;
  }

  REC_SDK_ALWAYS_INLINE RowKey key(int64_t, Place row) {
    if (__builtin_expect(~row_slots_[row] == kNoSlot, 0)) {
      row_slots_[row] = ~misses_.add(static_cast<int64_t>(row), static_cast<uint32_t>(row), false);
    }
    return ~row_slots_[row];
  }

 private:
  uint32_t* row_slots_;
  uint64_t rows_;
  MissList misses_;
};

// Writes a counter back also when an exception leaves the loop that counts.
struct Counter {
  int64_t first;
  uint32_t value;  // first + *target
  int64_t* target;
  ~Counter() { *target = value - first; }
};

}  // namespace

void Scan::begin(Group* group, const Batch& batch) {
  const size_t lookups = static_cast<size_t>(batch.lookups);
  local.ensure(lookups);
  unique.ensure(lookups + 1);
  last_batch_.ensure(lookups + 1);
  misses.ensure(lookups);
  stamps_ = group->uses.stamps();
  epoch_ = group->uses.epoch();
  tables_.assign(group->tables.size(), TableScan());
  size_t piece = 0;
  for (size_t t = 0; t < tables_.size(); ++t) {
    TableScan& table = tables_[t];
    table.first = piece < batch.pieces.size() ? batch.pieces[piece].begin : batch.lookups;
    table.first_piece = piece;
    while (piece < batch.pieces.size() &&
           group->features[batch.pieces[piece].feature].table == static_cast<int32_t>(t)) {
      ++piece;
    }
    table.end_piece = piece;
  }
}

void Scan::run(Group* group, const Batch& batch) {
  for_each_part(static_cast<int64_t>(tables_.size()), batch.lookups, [&](int64_t t) noexcept {
    try {
      scan_table(group, static_cast<int32_t>(t), batch);
    } catch (...) {
      tables_[t].error = std::current_exception();
    }
  });
  for (const TableScan& table : tables_) {
    if (table.error) std::rethrow_exception(table.error);
  }
}

void Scan::scan_table(Group* group, int32_t t, const Batch& batch) {
  TableScan& scan = tables_[t];
  Table& table = group->tables[t];
  const MissList list(table, group->slots, misses.data(), scan.first, &scan.misses);
  if (table.spec().hashed) {
    scan_pieces(HashDirectory(&table, list), batch, &scan);
  } else {
    scan_pieces(IndexDirectory(&table, list), batch, &scan);
  }
}

template <class Directory>
void Scan::scan_pieces(Directory directory, const Batch& batch, TableScan* table) {
  for (size_t p = table->first_piece; p < table->end_piece; ++p) {
    const Batch::Piece& piece = batch.pieces[p];
    const int64_t count = piece.end - piece.begin;
    uint32_t* out = local.data() + piece.begin;
    if (batch.values.wide) {
      scan_piece(&directory, static_cast<const int64_t*>(batch.values.data) + piece.source, count, out,
                 table);
    } else {
      scan_piece(&directory, static_cast<const int32_t*>(batch.values.data) + piece.source, count, out,
                 table);
    }
  }
}

// Lookups pass through a row of stages; see the distances above.
template <class Directory, class Id>
void Scan::scan_piece(Directory* directory, const Id* ids, int64_t count, uint32_t* local_out,
                      TableScan* table) {
  uint64_t* const stamps = stamps_;
  UniqueRow* const rows = unique.data();
  uint32_t* const last_batch = last_batch_.data();
  const uint64_t epoch = static_cast<uint64_t>(epoch_) << 32;
  Counter next{table->first, static_cast<uint32_t>(table->first + table->uniques), &table->uniques};
  typename Directory::Place places[kRing];
  RowKey keys[kRing];

  const auto find = [&](int64_t j) __attribute__((always_inline)) {
    if (j % kRing == 0 && directory->reserve(kRing)) {
      for (int64_t k = j; k < std::min(count, j + kEntryDistance); ++k) {
        places[k % kRing] = directory->prepare(ids[k]);
      }
    }
    if (j + kEntryDistance < count) {
      places[(j + kEntryDistance) % kRing] = directory->prepare(ids[j + kEntryDistance]);
    }
    const RowKey key = directory->key(ids[j], places[j % kRing]);
    keys[j % kRing] = key;
    prefetch_write(&stamps[key]);
  };
  const auto number = [&](int64_t j) __attribute__((always_inline)) {
    // No branch on first or repeated: on uniform batches it would be mispredicted half of the time.
    const RowKey key = keys[j % kRing];
    const uint64_t stamp = stamps[key];
    const bool seen = (stamp ^ epoch) >> 32 == 0;
    const uint32_t row = seen ? static_cast<uint32_t>(stamp) : next.value;
    stamps[key] = epoch | row;
    last_batch[next.value] = static_cast<uint32_t>(stamp >> 32);  // stays when the row is new
    const uint32_t before = rows[row].count;
    rows[row] = {key, seen ? before + 1 : 1};
    local_out[j] = row;
    next.value += !seen;
  };

  const int64_t first = std::min(count, kStampDistance);
  for (int64_t j = 0; j < std::min(count, kEntryDistance); ++j) places[j] = directory->prepare(ids[j]);
  for (int64_t j = 0; j < first; ++j) find(j);
  for (int64_t j = first; j < count; ++j) {
    find(j);
    number(j - kStampDistance);
  }
  for (int64_t j = count - first; j < count; ++j) number(j);
}

// Erasing moves entries, so every mark is looked up again. Ids go in reverse order of arrival.
void Scan::rollback(Group* group) noexcept {
  for (size_t t = 0; t < tables_.size(); ++t) {
    Table& table = group->tables[t];
    const Range rows = unique_rows(static_cast<int32_t>(t)), missed = missing(static_cast<int32_t>(t));
    for (int64_t u = rows.begin; u < rows.end; ++u) {
      if (unique[u].key < static_cast<RowKey>(group->slots))
        group->uses.restore(unique[u].key, last_batch_[u]);
    }
    for (int64_t m = missed.end; m-- > missed.begin;) {
      if (misses[m].added) {
        table.map().erase(misses[m].id, IdMap::hash(misses[m].id));
      } else {
        table.set_slot(misses[m].id, kNoSlot);
      }
    }
  }
}

}  // namespace rec_sdk
