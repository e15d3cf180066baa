// A rank's batch as the ranks of a sharded collection see it: each id of a table once, by the rank it is sent
// to.
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

struct SharedTable {
  int64_t num_embeddings;  // of an index table, whose ids are below; 0: a hash table
  OwnerRule owner;
  int32_t group;        // the rows of a group's tables are received in one tensor
  SignalKinds signals;  // what its ids take along
};

struct SharedTables {
  SharedTables(std::vector<SharedTable> tables, std::vector<Feature> features, int64_t groups, int64_t ranks,
               bool pooled);  // throws std::invalid_argument

  std::vector<SharedTable> tables;
  std::vector<Feature> features;  // ordered by table
  int64_t groups, ranks;
  bool pooled;

  SignalKinds any_signals() const;  // that some table's ids take along
};

// Arrays side by side, so that one copy brings them to a device. In words of 32 bits; each begins at 8 bytes.
class WordArena {
 public:
  struct Field {
    int64_t begin = -1, words = 0;  // -1: there is none
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

// A batch's reads of the tables of a group: n lookups of U distinct rows, of F features and B samples.
// Rows are received rank by rank, and there table by table.
struct UniqueGroup {
  std::vector<int32_t> tables, features;
  std::vector<int64_t> first_lookup, first_bag;  // of each of `features`, and the end
  int64_t rows = 0;
  std::unique_ptr<uint32_t[]> counts;  // [U] lookups of each row

  WordArena lookups;
  WordArena::Field slots;    // int32 [n] the received row of each lookup, feature by feature
  WordArena::Field offsets;  // int64 [F * B + 1] of the bags; pooled
  WordArena::Field source;   // int64 [n] where a lookup is in the batch's values; none: where it is here

  // Lookups sorted by row, for the backward pass.
  bool sorted = false;
  WordArena segments;
  WordArena::Field segment_offsets;  // int32 [U + 1]
  WordArena::Field grad_row;         // int32 [n] the lookup, or the sample when pooled
  WordArena::Field grad_column;      // int32 [n] pooled
  WordArena::Field scale;            // float [n] 1 / length of the bag for MEAN, else 1; with a MEAN feature
  WordArena::Field positions;        // int32 [n] the lookup; weighted bags
  WordArena::Field hot_segments;     // HotSegment [H]; none if H is 0

  int64_t lookup_count() const { return first_lookup.back(); }
};

struct UniqueBatch {
  std::shared_ptr<const SharedTables> shared;
  int64_t batch_size = 0;
  bool weighted = false;
  std::vector<int64_t> ids;      // [U] of each rank, and there of each table, in the order in which they came
  std::vector<int32_t> repeats;  // [U] lookups of each id
  std::vector<int64_t> counts;   // [W, T] distinct ids
  std::vector<int64_t> lookups;  // [W, T]
  std::vector<int32_t> signals;  // what each id takes along, in the order of `ids`
  std::vector<int64_t> latest;   // [T] timestamp
  struct OutOfRange {
    int32_t table;
    int64_t count, example;
  };
  std::vector<OutOfRange> out_of_range;  // these read row 0
  std::vector<UniqueGroup> groups;

  // The segments of a group, if they are not there yet. Not from two threads at a time.
  void sort(int64_t group);

 private:
  void sort_feature(UniqueGroup* group, size_t f) noexcept;
};

class Deduplicator {
 public:
  explicit Deduplicator(std::shared_ptr<const SharedTables> shared);

  // Tables side by side; the result does not depend on the number of threads. Throws std::invalid_argument.
  // `numbers`: the ids take along what their tables ask for.
  std::unique_ptr<UniqueBatch> run(const BatchInput& input, bool segments, bool with_signals = false);

  const SharedTables& shared() const { return *shared_; }

  // Where the search for an id begins, in 2^bits cells: elsewhere than in an id map, whose neighbours a batch
  // may have side by side.
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
    uint32_t slot;  // its rank, at first
  };
  struct Next {  // where an id goes, its row, and what it takes along
    int64_t id, slot, word;
  };
  struct alignas(64) TableRun {  // a cache line: threads write side by side
    int64_t first = 0, count = 0;
    int64_t rows = 0, wrong = 0, example = 0;
    int64_t first_in_group = 0;
    size_t first_piece = 0, end_piece = 0;
    int64_t latest = 0;
    std::vector<Next> next;  // [W] of each rank
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
  HugeArray<uint32_t> local_;  // [N] the row of each lookup, counted within its table
  HugeArray<Row> rows_;        // [N] of each table, from its first lookup on
  bool with_signals_ = false;
  HugeArray<IdSignals> signals_;  // [N] as the rows, with numbers
};

}  // namespace rec_sdk
