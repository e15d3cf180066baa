#include "torch_npu_ext/host/scan.h"

#include <algorithm>

namespace rec_sdk {
namespace {

// A lookup is a pipeline: hash and prefetch its entry, later probe and prefetch its stamp, later number its
// row. Evenly spaced misses of the processor's cache overlap; issued in blocks they queue up.
constexpr int64_t kEntryDistance = 48;
constexpr int64_t kStampDistance = 32;
constexpr int64_t kRing = 64;  // more than either distance; a power of two

// Numbers the rows that are not resident: by a slot that no row has had yet, or else by a key beyond the
// slots.
class MissList {
 public:
  MissList(const Table& table, int64_t slots, Miss* misses, int64_t* count)
      : misses_(misses),
        count_(count),
        next_slot_(static_cast<RowKey>(table.first_slot() + table.used_slots)),
        end_slot_(static_cast<RowKey>(table.end_slot())),
        beyond_(static_cast<RowKey>(slots)) {}

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

// How an id is found, for hash and for index tables. prepare() prefetches; key() marks a missing row.
class HashDirectory {
 public:
  HashDirectory(Table* table, MissList misses)
      : table_(table), map_(&table->map()), misses_(misses), next_row_(table->rows()) {}

  void reserve(int64_t extra) { table_->reserve_ids(extra); }

  REC_SDK_ALWAYS_INLINE uint64_t prepare(int64_t id) const {
    const uint64_t hash = IdMap::hash(id);
    map_->prefetch(hash);
    return hash;
  }

  REC_SDK_ALWAYS_INLINE RowKey key(int64_t id, uint64_t hash) {
    bool added = false;
    const IdMap::Entry entry = map_->find_or_add(id, hash, static_cast<uint32_t>(next_row_), &added);
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

  void reserve(int64_t) {}

  // Ids out of range are counted before the scan; here they become 0.
  REC_SDK_ALWAYS_INLINE uint64_t prepare(int64_t id) const {
    const uint64_t row = static_cast<uint64_t>(id) < rows_ ? static_cast<uint64_t>(id) : 0;
    prefetch_write(&row_slots_[row]);
    return row;
  }

  REC_SDK_ALWAYS_INLINE RowKey key(int64_t, uint64_t row) {
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
  uint32_t value;
  uint32_t* target;
  ~Counter() { *target = value; }
};

}  // namespace

void Scan::begin(Group* group, int64_t lookups) {
  local.ensure(static_cast<size_t>(lookups));
  unique.ensure(static_cast<size_t>(lookups) + 1);
  last_batch_.ensure(static_cast<size_t>(lookups) + 1);
  misses.ensure(static_cast<size_t>(lookups));
  miss_stamps_.ensure(static_cast<size_t>(lookups));
  if (renumbered_ != group->uses.renumbered()) {
    miss_stamps_ = HugeArray<uint64_t>(miss_stamps_.size());
    renumbered_ = group->uses.renumbered();
  }
  stamps_ = {group->uses.stamps(), miss_stamps_.data(), static_cast<RowKey>(group->slots)};
  epoch_ = group->uses.epoch();
  unique_offsets_.assign(group->tables.size() + 1, 0);
  miss_offsets_.assign(group->tables.size() + 1, 0);
  unique_count_ = 0;
  miss_count_ = 0;
  last_table_ = -1;
  next_piece_ = 0;
}

void Scan::scan_table(Group* group, int32_t t, const Batch& batch) {
  last_table_ = t;
  Table& table = group->tables[t];
  const MissList list(table, group->slots, misses.data(), &miss_count_);
  if (table.spec().hashed) {
    scan_pieces(HashDirectory(&table, list), t, *group, batch);
  } else {
    scan_pieces(IndexDirectory(&table, list), t, *group, batch);
  }
  unique_offsets_[t + 1] = unique_count_;
  miss_offsets_[t + 1] = miss_count_;
}

template <class Directory>
void Scan::scan_pieces(Directory directory, int32_t table, const Group& group, const Batch& batch) {
  for (; next_piece_ < batch.pieces.size(); ++next_piece_) {
    const Batch::Piece& piece = batch.pieces[next_piece_];
    if (group.features[piece.feature].table != table) return;
    const int64_t count = piece.end - piece.begin;
    uint32_t* out = local.data() + piece.begin;
    if (batch.values.wide) {
      scan_piece(&directory, static_cast<const int64_t*>(batch.values.data) + piece.source, count, out);
    } else {
      scan_piece(&directory, static_cast<const int32_t*>(batch.values.data) + piece.source, count, out);
    }
  }
}

template <class Directory, class Id>
void Scan::scan_piece(Directory* directory, const Id* ids, int64_t count, uint32_t* local_out) {
  const Stamps stamps = stamps_;
  UniqueRow* const rows = unique.data();
  uint32_t* const last_batch = last_batch_.data();
  const uint64_t epoch = static_cast<uint64_t>(epoch_) << 32;
  Counter next{unique_count_, &unique_count_};
  uint64_t places[kRing];
  RowKey keys[kRing];
  for (int64_t j = 0; j < std::min(count, kEntryDistance); ++j) places[j] = directory->prepare(ids[j]);
  for (int64_t j = 0; j < count + kStampDistance; ++j) {
    const int64_t ahead = j + kEntryDistance;
    if (ahead < count) places[ahead % kRing] = directory->prepare(ids[ahead]);
    if (j < count) {
      if (j % kRing == 0) directory->reserve(kRing);
      const RowKey key = directory->key(ids[j], places[j % kRing]);
      keys[j % kRing] = key;
      prefetch_write(stamps.at(key));
    }
    const int64_t behind = j - kStampDistance;
    if (behind < 0) continue;
    // No branch on first or repeated: on uniform batches it would be mispredicted half of the time.
    const RowKey key = keys[behind % kRing];
    uint64_t* const at = stamps.at(key);
    const uint64_t stamp = *at;
    const bool seen = (stamp ^ epoch) >> 32 == 0;
    const uint32_t row = seen ? static_cast<uint32_t>(stamp) : next.value;
    *at = epoch | row;
    last_batch[next.value] = static_cast<uint32_t>(stamp >> 32);  // stays when the row is new
    const uint32_t before = rows[row].count;
    rows[row] = {key, seen ? before + 1 : 1};
    local_out[behind] = row;
    next.value += !seen;
  }
}

// Erasing moves entries, so every mark is looked up again. Ids go in reverse order of arrival.
void Scan::rollback(Group* group) noexcept {
  for (int64_t u = 0; u < unique_count_; ++u) {
    if (unique[u].key < stamps_.slots) group->uses.restore(unique[u].key, last_batch_[u]);
  }
  int64_t end = miss_count_;  // the table whose scan threw has no end of its own
  for (int32_t t = last_table_; t >= 0; --t) {
    Table& table = group->tables[t];
    for (int64_t m = end; m-- > miss_offsets_[t];) {
      if (misses[m].added) {
        table.map().erase(misses[m].id, IdMap::hash(misses[m].id));
      } else {
        table.set_slot(misses[m].id, kNoSlot);
      }
    }
    end = miss_offsets_[t];
  }
  miss_count_ = 0;
}

}  // namespace rec_sdk
