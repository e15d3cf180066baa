// The deduplication of a rank's batch: each distinct id of a table once, grouped by the owner rank to which
// it is sent.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "torch_npu_ext/engine/base/id_hash.h"
#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/batch.h"
#include "torch_npu_ext/engine/group/group.h"
#include "torch_npu_ext/engine/plan/id_signals.h"
#include "torch_npu_ext/engine/plan/owner_rank.h"

namespace rec_sdk {

// A table of a sharded collection.
struct SharedTable {
  int64_t num_embeddings;  // number of rows of an index table; 0 for a hash table
  OwnerRule owner;
  int32_t group;        // index of the group; one tensor receives the rows of all tables of a group
  SignalKinds signals;  // the signals that are sent with its ids
};

struct SharedTables {
  SharedTables(std::vector<SharedTable> tables, std::vector<Feature> features, int64_t groups, int64_t ranks,
               bool pooled);  // throws std::invalid_argument

  std::vector<SharedTable> tables;
  std::vector<Feature> features;  // ordered by table
  int64_t groups, ranks;
  bool pooled;

  SignalKinds any_signals() const;  // the union over all tables
};

// Several arrays in one block of memory, so that one copy uploads them all. Positions are counted in 32-bit
// words, and each array is aligned to 8 bytes.
class WordArena {
 public:
  struct Field {
    int64_t begin = -1, words = 0;  // begin is -1 for an absent array
  };
  Field add(int64_t count, int64_t words_each = 1);
  void allocate() { words_.reset(new int32_t[static_cast<size_t>(size_ > 0 ? size_ : 1)]); }
  template <class T>
  T* at(const Field& field) const {
    return field.begin < 0 ? nullptr : reinterpret_cast<T*>(words_.get() + field.begin);
  }
  int32_t* words() const { return words_.get(); }
  int64_t size() const { return size_; }

 private:
  int64_t size_ = 0;
  std::unique_ptr<int32_t[]> words_;
};

// The lookups of a batch in the tables of a group: n lookups of U distinct rows, in F features and B samples.
// The group receives its rows ordered by rank, then table.
struct UniqueGroup {
  std::vector<int32_t> tables, features;
  std::vector<int64_t> first_lookup, first_bag;  // one entry for each of `features`, then the end
  int64_t rows = 0;
  std::unique_ptr<uint32_t[]> counts;  // [U] number of lookups of each row

  WordArena lookups;
  WordArena::Field slots;    // int32 [n] the received row of each lookup, feature by feature
  WordArena::Field offsets;  // int64 [F * B + 1] offsets of the bags; pooled only
  WordArena::Field
      source;  // int64 [n] index of each lookup in the batch's values; absent if it is the lookup's own index

  // The lookups sorted by row, for the backward pass.
  bool sorted = false;
  WordArena segments;
  WordArena::Field segment_offsets;  // int32 [U + 1]
  WordArena::Field grad_row;         // int32 [n] the lookup; pooled: the sample
  WordArena::Field grad_column;      // int32 [n] pooled only
  WordArena::Field scale;      // float [n] 1 / length of the bag for MEAN, else 1; only with a MEAN feature
  WordArena::Field positions;  // int32 [n] the lookup; only for weighted bags
  WordArena::Field hot_segments;  // HotSegment [H]; absent if H is 0

  int64_t lookup_count() const { return first_lookup.back(); }
};

struct UniqueBatch {
  std::shared_ptr<const SharedTables> shared;
  int64_t batch_size = 0;
  bool weighted = false;
  std::vector<int64_t> ids;      // [U] by rank, then table, then first occurrence
  std::vector<int32_t> repeats;  // [U] number of lookups of each id
  std::vector<int64_t> counts;   // [W, T] number of distinct ids
  std::vector<int64_t> lookups;  // [W, T] number of lookups of these ids
  std::vector<int32_t> signals;  // the signals that are sent with the ids, in their order
  std::vector<int64_t> latest;   // [T] latest timestamp
  struct OutOfRange {
    int32_t table;
    int64_t count, example;
  };
  std::vector<OutOfRange> out_of_range;  // lookups of these ids read row 0
  std::vector<UniqueGroup> groups;

  // Computes the segments of a group, unless they are computed already. Two threads must not call this at the
  // same time.
  void sort(int64_t group);

 private:
  void sort_feature(UniqueGroup* group, size_t f) noexcept;
};

// Deduplicator of the batches of one sharded collection. It reuses its buffers from batch to batch.
class Deduplicator {
 public:
  explicit Deduplicator(std::shared_ptr<const SharedTables> shared);

  // Deduplicates a batch, with the tables in parallel; the result does not depend on the number of threads.
  // If `segments`, also sorts the lookups of all groups. If `with_signals`, also collects the signals that
  // the tables use. Throws std::invalid_argument.
  std::unique_ptr<UniqueBatch> run(const BatchInput& input, bool segments, bool with_signals = false);

  const SharedTables& shared() const { return *shared_; }

  // Returns the cell, out of 2^bits cells, where the search for an id begins. The multiplier differs from the
  // one in id maps, because the ids of a batch may be neighbours in an id map.
  static REC_SDK_ALWAYS_INLINE uint64_t home(int64_t id, int bits) {
    return IdSeed::fold(IdSeed::hash(id), 0xA0761D6478BD642Full) >> (64 - bits);
  }

 private:
  struct Cell {
    int64_t id;
    uint32_t epoch, number;
  };
  struct Row {
    int64_t id;
    uint32_t count;
    uint32_t slot;  // the received row; before place(), the owner rank
  };
  struct Next {  // the next positions for an id, its received row and its signal words
    int64_t id, slot, word;
  };
  struct alignas(64) TableRun {  // aligned, because threads write to neighbouring elements
    int64_t first = 0, count = 0;
    int64_t rows = 0, wrong = 0, example = 0;
    int64_t first_in_group = 0;
    size_t first_piece = 0, end_piece = 0;
    int64_t latest = 0;
    std::vector<Next> next;  // [W] for each rank
    HugeArray<Cell> cells;
    int bits = 0;
  };

  void lay_out(const BatchInput& input, UniqueBatch* result);
  void number(int32_t t) noexcept;
  template <class Id>
  void number_piece(int32_t t, const Id* ids, int64_t count, uint32_t* local);
  void find_owners(int32_t t, UniqueBatch* result) noexcept;
  void find_signals(int32_t t) noexcept;
  void find_starts(UniqueBatch* result);
  void place(int32_t t, UniqueBatch* result) noexcept;

  std::shared_ptr<const SharedTables> shared_;
  std::mutex mutex_;
  uint32_t epoch_ = 0;
  Batch batch_;
  std::vector<TableRun> tables_;
  HugeArray<uint32_t> local_;  // [N] the row of each lookup, numbered within its table
  HugeArray<Row> rows_;        // [N] the rows of each table, from the index of its first lookup on
  bool with_signals_ = false;
  HugeArray<IdSignals> signals_;  // [N] signals of each row, if they are collected
};

}  // namespace rec_sdk
