#include "torch_npu_ext/engine/plan/scan.h"

#include <algorithm>
#include <type_traits>

#include "torch_npu_ext/engine/base/parallel.h"
#include "torch_npu_ext/engine/plan/numbering.h"
#include "torch_npu_ext/engine/plan/scan_blocks.h"
#include "torch_npu_ext/engine/plan/scan_directories.h"

namespace rec_sdk {
namespace {

constexpr int64_t kPartLookups = 4096;  // number of lookups that a thread locates as one piece of work
// Distances of prefetches in loops over single lookups, for tables that do not use the pipeline.
constexpr int64_t kEntryDistance = 48, kSettleDistance = 16, kStampDistance = 48, kNearDistance = 6,
                  kTallyLag = 16;
// A table with so few lookups does not use the pipeline, which would mostly fill and drain.
constexpr int64_t kSmallTable = 16;

// Finds the keys of lookups: kNoSlot for missing rows, whose lookups are listed in `missed`, by index in the
// batch. Returns the number of listed lookups. `first` is the index of ids[0] in the batch.
template <class Directory, class Id>
int64_t locate(const Directory& directory, const Id* ids, int64_t count, uint32_t first, RowKey* keys,
               uint32_t* missed) {
  const typename Directory::Places places = directory.places();
  typename Directory::Place prepared[kRing];
  // There is no branch on whether the key was found: with some rows missing, it would be mispredicted.
  int64_t peek_misses = 0;
  for (int64_t k = 0; k < count + kEntryDistance; ++k) {
    const int64_t peeked = k - kEntryDistance;
    if (peeked >= 0) {
      keys[peeked] = Directory::peek(ids[peeked], prepared[ring(peeked)]);
      missed[peek_misses] = static_cast<uint32_t>(peeked);
      peek_misses += keys[peeked] == kNoSlot;
    }
    if (k < count) {
      prepared[ring(k)] = places.of(ids[k]);
      prefetch(prepared[ring(k)]);
    }
  }
  int64_t listed = 0;
  for (int64_t v = 0; v < peek_misses; ++v) {
    if (v + kSettleDistance < peek_misses)
      prefetch(Directory::beyond(places.of(ids[missed[v + kSettleDistance]])));
    const uint32_t i = missed[v];
    bool known = false;
    keys[i] = directory.find(ids[i], &known);
    missed[listed] = (first + i) | (known ? kKnownRow : 0);
    listed += keys[i] == kNoSlot;
  }
  return listed;
}

// Access to the keys and row numbers of the lookups of a share: ListedLookups for a list of lookups,
// InPlaceLookups for all lookups of a table, where row numbers replace the keys.
struct ListedLookups {
  const RowKey* keys;
  const uint32_t* lookups;
  uint32_t* rows;
  REC_SDK_ALWAYS_INLINE RowKey key(int64_t i) const { return keys[lookups[i]]; }
  REC_SDK_ALWAYS_INLINE uint32_t& row(int64_t i) const { return rows[i]; }
};
struct InPlaceLookups {
  uint32_t* rows;
  REC_SDK_ALWAYS_INLINE RowKey key(int64_t i) const { return rows[i]; }
  REC_SDK_ALWAYS_INLINE uint32_t& row(int64_t i) const { return rows[i]; }
};

// Returns which of `shares` shares a row belongs to. Rows whose stamps are in the same cache line belong to
// the same share, so that no two threads write to the line.
REC_SDK_ALWAYS_INLINE uint32_t share_of(RowKey key, uint64_t shares) {
  constexpr uint32_t kStampsPerLine = 8;
  return static_cast<uint32_t>(key / kStampsPerLine * 0x9E3779B1u * shares >> 32);
}

}  // namespace

void Scan::begin(Group* group, const Batch& batch) {
  const size_t lookups = static_cast<size_t>(batch.lookups);
  local.ensure(lookups + static_cast<size_t>(kReadBeyond));
  unique.ensure(lookups);
  last_batch_.ensure(lookups);
  misses.ensure(lookups);
  stamps_ = group->uses.stamps();
  epoch_ = group->uses.epoch();
  tables_.assign(group->tables.size(), TableScan());
  unknown_.resize(group->tables.size());
  shares_.clear();
  const bool threaded = worth_threads(batch.lookups);
  const int64_t threads = threaded ? parallel_threads() : 1;
  size_t piece = 0;
  for (size_t t = 0; t < tables_.size(); ++t) {
    TableScan& table = tables_[t];
    table.first = piece < batch.pieces.size() ? batch.pieces[piece].begin : batch.lookups;
    table.first_piece = piece;
    while (piece < batch.pieces.size() &&
           group->features[batch.pieces[piece].feature].table == static_cast<int32_t>(t)) {
      table.count += batch.pieces[piece].end - batch.pieces[piece].begin;
      ++piece;
    }
    table.end_piece = piece;
    table.bound_before = group->tables[t].row_bound();
    table.admits = group->tables[t].spec().rules.admission() != nullptr;
    table.small = !threaded && !table.admits && table.count <= kSmallTable;
    table.first_share = shares_.size();
    const int64_t shares = (table.count * threads + batch.lookups - 1) / std::max<int64_t>(1, batch.lookups);
    table.end_share = table.first_share + std::max<int64_t>(1, shares);
    Share share;
    share.table = static_cast<int32_t>(t);
    share.first = table.first;
    share.count = table.count;
    shares_.resize(table.end_share, share);
  }
}

void Scan::run(Group* group, const Batch& batch, std::vector<LifecycleLog>* logs) {
  for (size_t t = 0; t < tables_.size(); ++t) tables_[t].log = &(*logs)[t];
  locate_small(group, batch);
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
  number_divided();
  place_segments(*group);
}

// Calls use(directory) with the directory of a table.
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

// Calls use(directory, ids, count, keys) for each piece of each small table.
template <class Use>
void Scan::for_each_small(Group* group, const Batch& batch, const Use& use) {
  for (size_t t = 0; t < tables_.size(); ++t) {
    const TableScan& table = tables_[t];
    if (!table.small || table.count == 0) continue;
    with_directory(group, static_cast<int32_t>(t), [&](const auto& directory) {
      for (size_t p = table.first_piece; p < table.end_piece; ++p) {
        const Batch::Piece& piece = batch.pieces[p];
        with_ids(batch, piece, [&](const auto* ids) {
          use(directory, ids, piece.end - piece.begin, local.data() + piece.begin);
        });
      }
    });
  }
}

// Searches the ids of all small tables together, so that their cache misses overlap.
void Scan::locate_small(Group* group, const Batch& batch) {
  for_each_small(group, batch, [](const auto& directory, const auto* ids, int64_t count, RowKey*) {
    const auto places = directory.places();
    for (int64_t j = 0; j < count; ++j) prefetch_near(places.of(ids[j]));
  });
  for_each_small(group, batch, [this](const auto& directory, const auto* ids, int64_t count, RowKey* keys) {
    const auto places = directory.places();
    for (int64_t j = 0; j < count; ++j) {
      const auto place = places.of(ids[j]);
      keys[j] = directory.peek(ids[j], place);
      prefetch_near(choose(keys[j] == kNoSlot, directory.beyond(place), &stamps_[keys[j]]));
    }
  });
}

// Finds the existing rows of large tables on all threads; nothing is changed. A table with more lookups than
// the share of one thread would otherwise keep the other threads idle. Afterwards one thread assigns keys to
// the missing rows in the order of the lookups, so that rows and slots do not depend on the number of
// threads. Finally all threads number the rows.
void Scan::locate_lookups(Group* group, const Batch& batch) {
  list_parts(batch);
  if (parts_.empty()) return;
  missed_.ensure(static_cast<size_t>(batch.lookups));
  run_pieces(static_cast<int64_t>(parts_.size()), [&](int64_t i) noexcept {
    Part& part = parts_[i];
    with_directory(group, part.table, [&](const auto& directory) {
      with_ids(batch, *part.piece, [&](const auto* ids) {
        part.missed =
            locate(directory, ids + (part.begin - part.piece->begin), part.end - part.begin,
                   static_cast<uint32_t>(part.begin), local.data() + part.begin, missed_.data() + part.begin);
      });
    });
  });
}

void Scan::list_parts(const Batch& batch) {
  parts_.clear();
  for (size_t t = 0; t < tables_.size(); ++t) {
    TableScan& table = tables_[t];
    if (!table.located()) continue;
    table.first_part = parts_.size();
    for (size_t p = table.first_piece; p < table.end_piece; ++p) {
      const Batch::Piece& piece = batch.pieces[p];
      for (int64_t begin = piece.begin; begin < piece.end; begin += kPartLookups) {
        parts_.push_back({static_cast<int32_t>(t), &piece, begin, std::min(begin + kPartLookups, piece.end)});
      }
    }
    table.end_part = parts_.size();
  }
}

template <class Lookups>
void Scan::number_lookups(Share* share, const Lookups& lookups) noexcept {
  Numbering numbering(stamps_, epoch_, unique.data(), last_batch_.data(), share);
  const int64_t count = share->count;
  for (int64_t i = 0; i < count + kTallyLag; ++i) {
    if (i + kStampDistance < count) prefetch(numbering.stamp(lookups.key(i + kStampDistance)));
    if (i + kNearDistance < count) prefetch_near(numbering.stamp(lookups.key(i + kNearDistance)));
    if (i < count) lookups.row(i) = numbering.number(lookups.key(i));
    if (i >= kTallyLag) numbering.tally(lookups.row(i - kTallyLag));
  }
}

void Scan::scan_table(Group* group, int32_t t, const Batch& batch) {
  const TableScan& table = tables_[t];
  with_directory(group, t, [&](auto directory) {
    if (table.admits) {
      count_unknown(group, t, batch);
      resolve_unknown(&directory, t, &group->tables[t]);
      return;
    }
    if (table.located()) return resolve_missed(&directory, t, batch);
    if (table.small) return resolve_small(&directory, t, batch);
    for (size_t p = table.first_piece; p < table.end_piece; ++p) {
      const Batch::Piece& piece = batch.pieces[p];
      with_ids(batch, piece, [&](const auto* ids) {
        scan_piece(&directory, ids, piece.end - piece.begin, local.data() + piece.begin,
                   &shares_[table.first_share]);
      });
    }
  });
  if (!table.numbered_last() || table.divided()) return;
  Share& share = shares_[table.first_share];
  number_lookups(&share, InPlaceLookups{local.data() + share.first});
}

// Assigns keys to the rows that locate() found missing.
template <class Directory>
void Scan::resolve_missed(Directory* directory, int32_t t, const Batch& batch) {
  for (size_t p = tables_[t].first_part; p < tables_[t].end_part; ++p) {
    const Part& part = parts_[p];
    const uint32_t* const missed = missed_.data() + part.begin;
    with_ids(batch, *part.piece, [&](const auto* ids) {
      for (int64_t m = 0; m < part.missed; ++m) {
        const int64_t lookup = missed[m] & ~kKnownRow;
        directory->reserve(1);
        local[lookup] = directory->key(ids[lookup - part.piece->begin]);
      }
    });
  }
}

// Assigns keys to the rows that locate_small() found missing.
template <class Directory>
void Scan::resolve_small(Directory* directory, int32_t t, const Batch& batch) {
  for (size_t p = tables_[t].first_piece; p < tables_[t].end_piece; ++p) {
    const Batch::Piece& piece = batch.pieces[p];
    with_ids(batch, piece, [&](const auto* ids) {
      if (piece.end > piece.begin)
        directory->reserve(kReserved);  // the same steps as in scan_piece(), so that maps grow identically
      for (int64_t i = piece.begin; i < piece.end; ++i) {
        if (__builtin_expect(local[i] != kNoSlot, 1)) continue;
        directory->reserve(1);
        local[i] = directory->key(ids[i - piece.begin]);
      }
    });
  }
}

// Lists the lookups of ids without a slot, in a table with an admission rule, and lets the rule count them.
void Scan::count_unknown(Group* group, int32_t t, const Batch& batch) {
  std::vector<UnknownLookup>& unknown = unknown_[t];
  unknown.clear();
  int64_t total = 0;
  for (size_t p = tables_[t].first_part; p < tables_[t].end_part; ++p) total += parts_[p].missed;
  unknown.reserve(static_cast<size_t>(total));
  for (size_t p = tables_[t].first_part; p < tables_[t].end_part; ++p) {
    const Part& part = parts_[p];
    const uint32_t* const missed = missed_.data() + part.begin;
    const size_t first = unknown.size();
    with_ids(batch, *part.piece, [&](const auto* ids) {
      for (int64_t m = 0; m < part.missed; ++m) {
        const uint32_t lookup = missed[m] & ~kKnownRow;
        const int64_t known = (missed[m] & kKnownRow) != 0 ? UnknownLookup::kKnown : 0;
        unknown.push_back({ids[lookup - part.piece->begin], known, lookup});
      }
    });
    const Table& table = group->tables[t];
    table.admission->count(batch, *part.piece, table.clock, first, &unknown, tables_[t].log);
  }
}

template <class Directory>
void Scan::resolve_unknown(Directory* directory, int32_t t, Table* table) {
  constexpr size_t kDistance = 16;  // distance of prefetches
  std::vector<UnknownLookup>& unknown = unknown_[t];
  LifecycleLog* const log = tables_[t].log;
  const size_t accepted = table->admission->accept(*log, table->default_slot(), &unknown, local.data());
  for (size_t i = 0; i < accepted; ++i) {
    if (i + kDistance < accepted) table->map().prefetch(IdMap::hash(unknown[i + kDistance].id));
    const UnknownLookup& one = unknown[i];
    directory->reserve(1);
    bool added = false;
    local[one.lookup] = directory->key(one.id, &added);
    if (!added) continue;
    log->admitted.push_back({one.id, misses[static_cast<size_t>(missing(t).end - 1)].row, one.place, {}});
  }
  table->admission->admit(log);
}

int64_t Scan::default_lookups(int32_t t) const {
  int64_t lookups = 0;
  for (size_t s = tables_[t].first_share; s < tables_[t].end_share; ++s) lookups += shares_[s].defaults;
  return lookups;
}

void Scan::number_divided() {
  std::vector<Share*> divided;
  int64_t listed = 0;
  for (const TableScan& table : tables_) {
    if (!table.divided()) continue;
    for (size_t s = table.first_share; s < table.end_share; ++s) divided.push_back(&shares_[s]);
    listed += table.count * static_cast<int64_t>(table.end_share - table.first_share);
  }
  if (divided.empty()) return;
  lists_.ensure(static_cast<size_t>(listed));
  list_rows_.ensure(local.size());
  listed = 0;
  for (Share* const share : divided) {
    share->lookups = lists_.data() + listed;
    listed += share->count;
  }
  const int64_t shares = static_cast<int64_t>(divided.size());
  run_pieces(shares, [&](int64_t s) noexcept { list_lookups(divided[s]); });
  for (const TableScan& table : tables_) {
    for (size_t s = table.first_share + 1; s < table.end_share; ++s) {
      shares_[s].first = shares_[s - 1].first + shares_[s - 1].count;
    }
  }
  run_pieces(shares, [&](int64_t s) noexcept {
    Share* const share = divided[s];
    share->rows = list_rows_.data() + share->first;
    number_lookups(share, ListedLookups{local.data(), share->lookups, share->rows});
  });
}

// Computes where the segments of each share begin. The lookups of default rows, which were numbered like any
// other row, get positions behind all segments.
void Scan::place_segments(const Group& group) noexcept {
  int64_t position = 0;
  for (size_t s = 0; s < shares_.size(); ++s) {
    Share& share = shares_[s];
    find_default_row(group.tables[share.table], &share);
    share.position = position;
    position += share.count - share.defaults;
    if (s > tables_[share.table].first_share) {
      share.uniques_before = shares_[s - 1].uniques_before + shares_[s - 1].rows_found();
    }
  }
  segment_lookups_ = position;
  for (Share& share : shares_) {
    share.default_position = position;
    position += share.defaults;
  }
}

void Scan::find_default_row(const Table& table, Share* share) const noexcept {
  if (!table.spec().default_row) return;
  const uint64_t stamp = stamps_[table.default_slot()];
  const int64_t row = static_cast<uint32_t>(stamp);
  if (stamp >> 32 != epoch_ || row < share->first || row >= share->end()) return;
  share->default_row = row;
  share->defaults = unique[static_cast<size_t>(row)].count;
}

// Lists the lookups whose rows belong to the share, and sets share->count to their number. Until then it is
// the number of all lookups of the table.
void Scan::list_lookups(Share* share) noexcept {
  const TableScan& table = tables_[share->table];
  const uint64_t shares = table.end_share - table.first_share;
  const uint32_t number = static_cast<uint32_t>(share - &shares_[table.first_share]);
  int64_t count = 0;
  for (int64_t i = table.first; i < table.first + table.count; ++i) {
    share->lookups[count] = static_cast<uint32_t>(i);
    count += share_of(local[i], shares) == number;
  }
  share->count = count;
}

// Moves the lookups of a piece through the stages that scan_blocks.h describes. The keys of lookups are in
// local_out until their rows are numbered.
template <class Directory, class Id>
void Scan::scan_piece(Directory* directory, const Id* ids, int64_t count, uint32_t* local_out, Share* share) {
  Numbering numbering(stamps_, epoch_, unique.data(), last_batch_.data(), share);
  typename Directory::Place places[kRing] = {};
  typename Directory::Places current = directory->places();
  uint32_t missing[kRing / kBlock] = {};  // as returned by missing_of(), for each block

  const auto prepare = [&](int64_t block, auto inside) __attribute__((always_inline)) {
    const auto prepare_with = [&](const auto& place_of) __attribute__((always_inline)) {
      for_block<inside>(block, count, [&](int64_t first, int64_t k) __attribute__((always_inline)) {
        const typename Directory::Place place = place_of(ids[first + k]);
        prefetch(place);
        places[ring(first) + k] = place;
      });
    };
    if (__builtin_expect(current.grows(), 0)) return prepare_with([&](int64_t id) { return current.of(id); });
    prepare_with([&](int64_t id) { return current.of_whole(id); });
  };
  const auto peek = [&](int64_t block, auto inside) __attribute__((always_inline)) {
    for_block<inside>(block, count, [&](int64_t first, int64_t k) __attribute__((always_inline)) {
      const RowKey key = Directory::peek(ids[first + k], places[ring(first) + k]);
      local_out[first + k] = key;
      prefetch(numbering.stamp(key + 1));  // the same line in most cases, and the first one for kNoSlot
      prefetch_near(places[ring(first + kBlock) + k]);
    });
  };
  // Few blocks of a batch of known ids have two lookups whose keys were not found. There is no branch on the
  // first one, because it would often be mispredicted.
  const auto prefetch_beyond = [&](int64_t block, auto inside) __attribute__((always_inline)) {
    const uint32_t lookups = missing_of<inside>(local_out, block, count);
    const auto* const of_block = &places[ring(block * kBlock)];
    missing[ring(block * kBlock) / kBlock] = lookups;
    if (!inside && lookups == 0) return;
    prefetch(Directory::beyond(of_block[first_of(lookups)], lookups != 0));
    for_each_bit(lookups & (lookups - 1), [&](int64_t k) { prefetch(Directory::beyond(of_block[k])); });
  };
  const auto settle = [&](int64_t block, auto inside) __attribute__((always_inline)) {
    const int64_t first = block * kBlock;
    if ((inside || (block >= 0 && first < count)) && first % kReserved == 0 &&
        directory->reserve(kReserved)) {
      current = directory->places();
      for (int64_t b = block + kSettle - kPeek + 1; b <= block + kSettle; ++b) prepare(b, std::false_type());
    }
    for_each_bit(missing[ring(first) / kBlock],
                 [&](int64_t k) { local_out[first + k] = directory->key(ids[first + k]); });
    for_block<inside>(block, count, [&](int64_t, int64_t k) __attribute__((always_inline)) {
      prefetch_near(numbering.stamp(local_out[first + k]));
    });
  };
  const auto step = [&](int64_t b, auto inside) __attribute__((always_inline)) {
    prepare(b, inside);
    peek(b - kPeek, inside);
    prefetch_beyond(b - kBeyond, inside);
    settle(b - kSettle, inside);
    for_block<inside>(b - kNumber, count, [&](int64_t first, int64_t k) __attribute__((always_inline)) {
      local_out[first + k] = numbering.number(local_out[first + k]);
    });
    for_block<inside>(b - kTally, count, [&](int64_t first, int64_t k) __attribute__((always_inline)) {
      numbering.tally(local_out[first + k]);
    });
  };

  const int64_t whole = count / kBlock, blocks = (count + kBlock - 1) / kBlock;
  for (int64_t b = 0; b < blocks + kTally; ++b) {
    b >= kTally&& b < whole ? step(b, std::true_type()) : step(b, std::false_type());
  }
}

// Undoes added ids and assigned keys in reverse order. Erasing moves entries, so each is searched again.
void Scan::rollback(Group* group) noexcept {
  for (size_t t = 0; t < tables_.size(); ++t) {
    Table& table = group->tables[t];
    for (size_t s = tables_[t].first_share; s < tables_[t].end_share; ++s) {
      for (int64_t u = shares_[s].first; u < shares_[s].end(); ++u) {
        const RowKey key = unique[u].key;
        if (key < static_cast<RowKey>(group->slots)) group->uses.restore(key, last_batch_[u]);
      }
    }
    const Range missed = missing(static_cast<int32_t>(t));
    for (int64_t m = missed.end; m-- > missed.begin;) {
      if (misses[m].added) {
        table.directory().undo_add(misses[m].id, misses[m].row, tables_[t].bound_before);
      } else {
        table.clear_slot(misses[m].id, misses[m].row);
      }
    }
    table.admission->undo(*tables_[t].log);
  }
}

}  // namespace rec_sdk
