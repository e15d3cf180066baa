#include "torch_npu_ext/host/scan.h"

#include <algorithm>

namespace rec_sdk {
namespace {

// A lookup is a pipeline: hash and prefetch its entry, later probe and prefetch its stamp, later number its
// row. Evenly spaced misses of the processor's cache overlap; issued in blocks they queue up.
constexpr int64_t kEntryDistance = 48;
constexpr int64_t kStampDistance = 32;
constexpr int64_t kRing = 64;  // more than either distance; a power of two

// How an id is found, for hash and for index tables. prepare() prefetches; key() adds a missing row to
// `misses`.
class HashDirectory {
 public:
  HashDirectory(Table* table, Miss* misses, int64_t* miss_count, RowKey first_miss_key)
      : table_(table),
        map_(&table->map()),
        misses_(misses),
        miss_count_(miss_count),
        first_miss_key_(first_miss_key),
        next_row_(table->rows()) {}

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
    misses_[*miss_count_] = {id, entry.row, added};
    *entry.slot = first_miss_key_ + static_cast<RowKey>((*miss_count_)++);
    if (added) table_->check_capacity(++next_row_, id);
  }

  Table* table_;
  IdMap* map_;
  Miss* misses_;
  int64_t* miss_count_;
  RowKey first_miss_key_;
  int64_t next_row_;
};

class IndexDirectory {
 public:
  IndexDirectory(Table* table, Miss* misses, int64_t* miss_count, RowKey first_miss_key)
      : row_slots_(table->row_slots()),
        rows_(static_cast<uint64_t>(table->spec().num_embeddings)),
        misses_(misses),
        miss_count_(miss_count),
        first_miss_key_(first_miss_key) {}

  void reserve(int64_t) {}

  // Ids out of range are counted before the scan; here they become 0.
  REC_SDK_ALWAYS_INLINE uint64_t prepare(int64_t id) const {
    const uint64_t row = static_cast<uint64_t>(id) < rows_ ? static_cast<uint64_t>(id) : 0;
    prefetch_write(&row_slots_[row]);
    return row;
  }

  REC_SDK_ALWAYS_INLINE RowKey key(int64_t, uint64_t row) {
    if (__builtin_expect(~row_slots_[row] == kNoSlot, 0)) {
      misses_[*miss_count_] = {static_cast<int64_t>(row), static_cast<uint32_t>(row), false};
      row_slots_[row] = ~(first_miss_key_ + static_cast<RowKey>((*miss_count_)++));
    }
    return ~row_slots_[row];
  }

 private:
  uint32_t* row_slots_;
  uint64_t rows_;
  Miss* misses_;
  int64_t* miss_count_;
  RowKey first_miss_key_;
};

}  // namespace

void Scan::begin(const Group& group, int64_t lookups) {
  local.ensure(static_cast<size_t>(lookups));
  unique.ensure(static_cast<size_t>(lookups) + 1);
  misses.ensure(static_cast<size_t>(lookups));
  stamps_.ensure(static_cast<size_t>(group.slots + lookups));
  unique_offsets_.assign(group.tables.size() + 1, 0);
  miss_offsets_.assign(group.tables.size() + 1, 0);
  unique_count_ = 0;
  miss_count_ = 0;
  last_table_ = -1;
  next_piece_ = 0;
  if (++epoch_ == 0) {
    stamps_ = HugeArray<uint64_t>(stamps_.size());
    epoch_ = 1;
  }
}

void Scan::scan_table(Group* group, int32_t t, const Batch& batch) {
  last_table_ = t;
  Table& table = group->tables[t];
  const RowKey first_miss_key = static_cast<RowKey>(group->slots);
  if (table.spec().hashed) {
    scan_pieces(HashDirectory(&table, misses.data(), &miss_count_, first_miss_key), t, *group, batch);
  } else {
    scan_pieces(IndexDirectory(&table, misses.data(), &miss_count_, first_miss_key), t, *group, batch);
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
  uint64_t* const stamps = stamps_.data();
  UniqueRow* const rows = unique.data();
  const uint64_t epoch = static_cast<uint64_t>(epoch_) << 32;
  uint32_t next = unique_count_;
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
      prefetch_write(&stamps[key]);
    }
    const int64_t behind = j - kStampDistance;
    if (behind < 0) continue;
    // No branch on first or repeated: on uniform batches it would be mispredicted half of the time.
    const RowKey key = keys[behind % kRing];
    const uint64_t stamp = stamps[key];
    const bool seen = (stamp ^ epoch) >> 32 == 0;
    const uint32_t row = seen ? static_cast<uint32_t>(stamp) : next;
    stamps[key] = epoch | row;
    const uint32_t before = rows[row].count;
    rows[row] = {key, seen ? before + 1 : 1};
    local_out[behind] = row;
    next += !seen;
  }
  unique_count_ = next;
}

// Erasing moves entries, so every mark is looked up again. Ids go in reverse order of arrival.
void Scan::rollback(Group* group) noexcept {
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
