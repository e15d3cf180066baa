#include "torch_npu_ext/host/scan.h"

#include <algorithm>

#include "torch_npu_ext/host/parallel.h"

namespace rec_sdk {
namespace {

// A lookup is a pipeline: hash and prefetch its entry; later peek there and prefetch its stamp; later settle
// what a peek does not find; later number its row; later count it. Evenly spaced misses of the processor's
// cache overlap; issued in blocks they queue up. What was prefetched into L2 is fetched into L1 shortly
// before its use: processors seem to drop prefetches into L2 at times, and without it plans then took up to
// three times as long.
constexpr int64_t kEntryDistance = 48;                                              // from hashing to peeking
constexpr int64_t kSettleDistance = 16, kNumberDistance = 32, kTallyDistance = 48;  // from peeking
constexpr int64_t kNearDistance = 6;                                                // to the next stage
constexpr int64_t kRing = 64;           // no less than any distance; a power of two
constexpr int64_t kPartLookups = 4096;  // located in one go
constexpr uint64_t ring(int64_t j) { return static_cast<uint64_t>(j) % kRing; }

// Of two addresses; GCC makes a condition a branch here, and the processor mispredicts it.
REC_SDK_ALWAYS_INLINE const void* choose(bool first, const void* a, const void* b) {
  const uintptr_t x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return reinterpret_cast<const void*>(y ^ ((x ^ y) & (uintptr_t{0} - first)));
}

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

// How an id is found, for hash and for index tables. `places` says where, as of(id, lookup), until reserve()
// says that they have moved; to peek there gives the key of a row that has one, in most cases, or else
// kNoSlot. key() always gives one, and marks a missing row; after a vain peek it reads what is beyond the
// place. find() does not mark, and gives kNoSlot for a missing row.
class HashDirectory {
 public:
  using Place = const IdMap::Bucket*;
  struct Places {
    IdMap::Homes homes;
    REC_SDK_ALWAYS_INLINE Place of(int64_t id, int64_t) const { return homes.of(IdMap::hash(id)); }
  };

  HashDirectory(Table* table, MissList misses) : table_(table), misses_(misses), next_row_(table->rows()) {}

  Places places(const RowKey*) const { return {table_->map().homes()}; }
  bool reserve(int64_t extra) { return table_->reserve_ids(extra); }

  static REC_SDK_ALWAYS_INLINE RowKey peek(int64_t id, Place home) { return IdMap::slot_at(*home, id); }
  static REC_SDK_ALWAYS_INLINE const void* beyond(Place home) { return home + 1; }

  RowKey find(int64_t id) const {
    const IdMap::Entry entry = table_->map().find(id, IdMap::hash(id));
    return entry ? *entry.slot : kNoSlot;
  }
  RowKey key(int64_t id) {
    bool added = false;
    const IdMap::Entry entry =
        table_->map().find_or_add(id, IdMap::hash(id), static_cast<uint32_t>(next_row_), &added);
    if (*entry.slot == kNoSlot) {
      *entry.slot = misses_.add(id, entry.row, added);
      if (added) table_->check_capacity(++next_row_, id);
    }
    return *entry.slot;
  }

 private:
  Table* table_;
  MissList misses_;
  int64_t next_row_;
};

class IndexDirectory {
 public:
  using Place = const uint32_t*;
  struct Places {
    uint32_t* row_slots;
    uint64_t rows;
    // Ids out of range are counted before the scan; here they become 0.
    REC_SDK_ALWAYS_INLINE uint64_t row_of(int64_t id) const {
      return static_cast<uint64_t>(id) < rows ? static_cast<uint64_t>(id) : 0;
    }
    REC_SDK_ALWAYS_INLINE Place of(int64_t id, int64_t) const { return row_slots + row_of(id); }
  };

  IndexDirectory(Table* table, MissList misses)
      : places_{table->row_slots(), static_cast<uint64_t>(table->spec().num_embeddings)}, misses_(misses) {}

  Places places(const RowKey*) const { return places_; }
  bool reserve(int64_t) { return false; }

  static REC_SDK_ALWAYS_INLINE RowKey peek(int64_t, Place place) { return ~*place; }
  static REC_SDK_ALWAYS_INLINE const void* beyond(Place place) { return place; }

  RowKey find(int64_t) const { return kNoSlot; }  // a peek has said so
  RowKey key(int64_t id) {
    const uint64_t row = places_.row_of(id);
    uint32_t& slot = places_.row_slots[row];
    if (~slot == kNoSlot) slot = ~misses_.add(static_cast<int64_t>(row), static_cast<uint32_t>(row), false);
    return ~slot;
  }

 private:
  Places places_;
  MissList misses_;
};

// Of lookups that locate() has peeked at already.
template <class Directory>
class Located : public Directory {
 public:
  using Place = const RowKey*;
  struct Places {
    const RowKey* located;
    REC_SDK_ALWAYS_INLINE Place of(int64_t, int64_t j) const { return located + j; }
  };

  explicit Located(const Directory& directory) : Directory(directory) {}

  Places places(const RowKey* located) const { return {located}; }
  static REC_SDK_ALWAYS_INLINE RowKey peek(int64_t, Place place) { return *place; }
  static REC_SDK_ALWAYS_INLINE const void* beyond(Place place) { return place; }
};

// The keys of rows that have one, or else kNoSlot.
template <class Directory, class Id>
void locate(const Directory& directory, const Id* ids, int64_t count, RowKey* keys) {
  const typename Directory::Places places = directory.places(keys);
  typename Directory::Place prepared[kRing];
  for (int64_t k = 0; k < count + kEntryDistance + kSettleDistance; ++k) {
    const int64_t peeked = k - kEntryDistance, settled = peeked - kSettleDistance;
    if (peeked >= 0 && peeked < count) {
      const typename Directory::Place place = prepared[ring(peeked)];
      keys[peeked] = Directory::peek(ids[peeked], place);
      if (keys[peeked] == kNoSlot) prefetch(Directory::beyond(place));
    }
    if (k < count) {
      prepared[ring(k)] = places.of(ids[k], k);
      prefetch(prepared[ring(k)]);
    }
    if (settled >= 0 && keys[settled] == kNoSlot) keys[settled] = directory.find(ids[settled]);
  }
}

// Calls use(ids of the piece): int64 or int32.
template <class Use>
void with_ids(const Batch& batch, const Batch::Piece& piece, const Use& use) {
  if (batch.values.wide) {
    use(static_cast<const int64_t*>(batch.values.data) + piece.source);
  } else {
    use(static_cast<const int32_t*>(batch.values.data) + piece.source);
  }
}

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
  locate_lookups(group, batch);
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

// Calls use(directory) of a table.
template <class Use>
void Scan::with_directory(Group* group, int32_t t, const Use& use) {
  TableScan& scan = tables_[t];
  Table& table = group->tables[t];
  const MissList list(table, group->slots, misses.data(), scan.first, &scan.misses);
  if (table.spec().hashed) {
    use(HashDirectory(&table, list));
  } else {
    use(IndexDirectory(&table, list));
  }
}

// Tables with more than a thread's share of the lookups would keep the others waiting: of these, what does
// not change anything is done by all threads first.
void Scan::locate_lookups(Group* group, const Batch& batch) {
  if (!worth_threads(batch.lookups)) return;
  struct Part {
    int32_t table;
    const Batch::Piece* piece;
    int64_t begin, end;
  };
  std::vector<Part> parts;
  const int64_t share = batch.lookups / parallel_threads();
  for (size_t t = 0; t < tables_.size(); ++t) {
    TableScan& table = tables_[t];
    if (table.first_piece == table.end_piece) continue;
    table.located = batch.pieces[table.end_piece - 1].end - table.first > share;
    if (!table.located) continue;
    for (size_t p = table.first_piece; p < table.end_piece; ++p) {
      const Batch::Piece& piece = batch.pieces[p];
      for (int64_t begin = piece.begin; begin < piece.end; begin += kPartLookups) {
        parts.push_back({static_cast<int32_t>(t), &piece, begin, std::min(begin + kPartLookups, piece.end)});
      }
    }
  }
  run_pieces(static_cast<int64_t>(parts.size()), [&](int64_t i) noexcept {
    const Part& part = parts[i];
    with_directory(group, part.table, [&](const auto& directory) {
      with_ids(batch, *part.piece, [&](const auto* ids) {
        locate(directory, ids + (part.begin - part.piece->begin), part.end - part.begin,
               local.data() + part.begin);
      });
    });
  });
}

void Scan::scan_table(Group* group, int32_t t, const Batch& batch) {
  with_directory(group, t, [&](const auto& directory) {
    if (tables_[t].located) {
      scan_pieces(Located(directory), batch, &tables_[t]);
    } else {
      scan_pieces(directory, batch, &tables_[t]);
    }
  });
}

template <class Directory>
void Scan::scan_pieces(Directory directory, const Batch& batch, TableScan* table) {
  for (size_t p = table->first_piece; p < table->end_piece; ++p) {
    const Batch::Piece& piece = batch.pieces[p];
    with_ids(batch, piece, [&](const auto* ids) {
      scan_piece(&directory, ids, piece.end - piece.begin, local.data() + piece.begin, table);
    });
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
  typename Directory::Place places[kRing] = {};
  const void* peeked[kRing] = {};  // what a peek prefetched
  RowKey keys[kRing];
  typename Directory::Places current = directory->places(local_out);

  const auto prepare = [&](int64_t j) __attribute__((always_inline)) {
    const typename Directory::Place place = current.of(ids[j], j);
    prefetch(place);
    places[ring(j)] = place;
  };
  const auto peek = [&](int64_t j) __attribute__((always_inline)) {
    const typename Directory::Place place = places[ring(j)];
    const RowKey key = Directory::peek(ids[j], place);
    keys[ring(j)] = key;
    peeked[ring(j)] = choose(key == kNoSlot, Directory::beyond(place), &stamps[key]);
    prefetch(peeked[ring(j)]);
    prefetch_near(places[ring(j + kNearDistance)]);
    if (j + kEntryDistance < count) prepare(j + kEntryDistance);
  };
  const auto settle = [&](int64_t j) __attribute__((always_inline)) {
    if (ring(j) == 0 && directory->reserve(kRing)) {
      current = directory->places(local_out);
      const int64_t next_peek = j + kSettleDistance + 1;
      for (int64_t k = next_peek; k < std::min(count, next_peek + kEntryDistance); ++k) prepare(k);
    }
    prefetch_near(peeked[ring(j + kNearDistance)]);
    RowKey& key = keys[ring(j)];
    if (__builtin_expect(key != kNoSlot, 1)) return;
    key = directory->key(ids[j]);
    prefetch_near(&stamps[key]);
  };
  const auto number = [&](int64_t j) __attribute__((always_inline)) {
    // No branch on first or repeated: on uniform batches it would be mispredicted half of the time.
    const RowKey key = keys[ring(j)];
    const uint64_t stamp = stamps[key];
    const bool seen = (stamp ^ epoch) >> 32 == 0;
    const uint32_t row = seen ? static_cast<uint32_t>(stamp) : next.value;
    stamps[key] = epoch | row;
    // These two stay when the row is new.
    last_batch[next.value] = static_cast<uint32_t>(stamp >> 32);
    rows[next.value] = {key, 0};
    local_out[j] = row;
    prefetch(&rows[row]);
    next.value += !seen;
  };
  const auto tally = [&](int64_t j) __attribute__((always_inline)) { ++rows[local_out[j]].count; };
  const auto step_at_edge = [&](int64_t j) __attribute__((always_inline)) {
    if (j < count) peek(j);
    if (j >= kSettleDistance && j - kSettleDistance < count) settle(j - kSettleDistance);
    if (j >= kNumberDistance && j - kNumberDistance < count) number(j - kNumberDistance);
    if (j >= kTallyDistance && j - kTallyDistance < count) tally(j - kTallyDistance);
  };

  for (int64_t k = 0; k < std::min(count, kEntryDistance); ++k) prepare(k);
  int64_t j = 0;
  for (; j < std::min(count, kTallyDistance); ++j) step_at_edge(j);
  for (; j < count; ++j) {
    peek(j);
    settle(j - kSettleDistance);
    number(j - kNumberDistance);
    tally(j - kTallyDistance);
  }
  for (; j < count + kTallyDistance; ++j) step_at_edge(j);
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
