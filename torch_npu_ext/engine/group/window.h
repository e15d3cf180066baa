// The accumulation window of a group: the rows that have pending sums of gradients. The sum of a cached row
// is on the device, indexed by slot. The sum of any other row is spilled to host memory, in this object.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/directory/id_map.h"

namespace rec_sdk {

// The sums of rows outside the cache: a map from (table, row) to the sum and its compensation.
class SpilledSums {
 public:
  static constexpr uint32_t kNone = 0xFFFFFFFFu;
  struct Spilled {
    int64_t key;  // table << 32 | row, so that keys are ordered by table, then row
    uint32_t place;
    int32_t table() const { return static_cast<int32_t>(key >> 32); }
    uint32_t row() const { return static_cast<uint32_t>(key); }
  };

  explicit SpilledSums(int64_t dim);

  void reserve(int64_t extra);  // reserves space for `extra` more rows, so that put() cannot fail
  uint32_t put(int32_t table,
               uint32_t row);  // adds a row; its sums belong in data() of the returned position
  uint32_t take(
      int32_t table,
      uint32_t row);  // removes a row; returns its position, which stays in use until free(), or kNone
  bool has(int32_t table, uint32_t row) const {
    return static_cast<bool>(places_.find(key(table, row), IdMap::hash(key(table, row))));
  }
  void put_back(int32_t table, uint32_t row, uint32_t place);  // undoes take(); no put() may come in between
  void free(uint32_t place) { free_.push_back(place); }
  float* data(uint32_t place) const { return static_cast<float*>(sums_.at(place)); }  // [2 * dim]

  const std::vector<Spilled>& sorted();  // all rows, ordered by key
  void drop_table(int32_t table);
  void clear();
  int64_t size() const { return places_.size(); }
  uint64_t epoch() const { return epoch_; }  // changes when clear() invalidates all positions

 private:
  static int64_t key(int32_t table, uint32_t row) { return (static_cast<int64_t>(table) << 32) | row; }

  IdMap places_;  // key -> position, stored as the entry's row
  ChunkedMemory sums_;
  std::vector<uint32_t> free_;
  uint32_t used_ = 0;  // number of positions in use or free
  std::vector<Spilled> sorted_;
  bool sorted_valid_ = false;
  uint64_t epoch_ = 0;
};

// The rows of a group that have sums, in the cache and outside of it.
class Window {
 public:
  Window(int64_t dim, int64_t slots) : dim_(dim), flags_(static_cast<size_t>(slots)), spilled_(dim) {}

  bool empty() const { return resident_ == 0 && spilled_.size() == 0; }
  void mark(int64_t slot) {
    if (flags_[slot] == 0) slots_.push_back(static_cast<int32_t>(slot));
    resident_ += flags_[slot] == 0;
    flags_[slot] = 1;
  }

  // move() moves the sums of a plan's rows: sums of rows out are spilled, and spilled sums of rows in return
  // to the device. bound() returns upper bounds of the numbers of sums to move for `out` and `in` rows.
  // reserve() allocates the memory for them, so that move() cannot fail.
  struct Bound {
    int64_t out, in;
  };
  Bound bound(int64_t out, int64_t in) const;
  void reserve(const Bound& bound, PlanBuffers* plan);
  void move(PlanBuffers* plan) noexcept;
  void undo(PlanBuffers* plan) noexcept;
  // Must be called when the plan is applied: frees the positions of the sums that are now on the device.
  void finish(const PlanBuffers& plan) noexcept;

  // write() stores the sums [rows, 2 * dim] of the plan's rows out; read() returns the sums of its rows in.
  // The latter stay in memory until finish().
  void write(const PlanBuffers& plan, const float* sums);
  void read(const PlanBuffers& plan, float* sums) const;

  std::vector<int32_t> resident_slots() const;  // ascending
  const std::vector<SpilledSums::Spilled>& spilled() { return spilled_.sorted(); }
  const float* sums(uint32_t place) const { return spilled_.data(place); }
  // Adds sums [count, 2 * dim] of rows outside the cache, none of which may have a sum yet. Throws
  // std::bad_alloc.
  void put_spilled(int32_t table, const int64_t* rows, int64_t count, const float* sums);
  void drop_slots(int64_t begin, int64_t end) noexcept;
  void drop_table(int32_t table) { spilled_.drop_table(table); }
  bool has(int32_t table, uint32_t row, int64_t slot) const {  // `slot` is -1 if the row is not cached
    return slot >= 0 ? flags_[slot] != 0 : spilled_.has(table, row);
  }
  void close();

 private:
  void clear(int64_t slot) {
    resident_ -= flags_[slot];
    flags_[slot] = 0;
  }

  int64_t dim_;
  HugeArray<uint8_t> flags_;    // [slots] whether the row in the slot has a sum
  int64_t resident_ = 0;        // number of set flags
  std::vector<int32_t> slots_;  // slots whose flag was set at some time; may contain duplicates
  SpilledSums spilled_;
};

}  // namespace rec_sdk
