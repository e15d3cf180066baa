// The accumulation window of a group: which rows have gradients that wait for its end, and the sums of those
// that left the cache. The sums of resident rows are on the device, one row for each slot.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/batch/plan_buffers.h"
#include "torch_npu_ext/engine/directory/id_map.h"

namespace rec_sdk {

// Sums of rows that are away: (table, row) -> sum and compensation.
class SpilledSums {
 public:
  static constexpr uint32_t kNone = 0xFFFFFFFFu;
  struct Spilled {
    int64_t key;  // table << 32 | row: ordered by table, then row
    uint32_t place;
    int32_t table() const { return static_cast<int32_t>(key >> 32); }
    uint32_t row() const { return static_cast<uint32_t>(key); }
  };

  explicit SpilledSums(int64_t dim);

  void reserve(int64_t extra);                 // room for `extra` more rows: put() cannot fail then
  uint32_t put(int32_t table, uint32_t row);   // the row left; its sums go to data() of the returned place
  uint32_t take(int32_t table, uint32_t row);  // the row came back: its place, which stays in use, or kNone
  bool has(int32_t table, uint32_t row) const {
    return static_cast<bool>(places_.find(key(table, row), IdMap::hash(key(table, row))));
  }
  void put_back(int32_t table, uint32_t row, uint32_t place);  // undoes take(), before anything else is put
  void free(uint32_t place) { free_.push_back(place); }
  float* data(uint32_t place) const { return static_cast<float*>(sums_.at(place)); }  // [2 * dim]

  const std::vector<Spilled>& sorted();  // all rows away
  void drop_table(int32_t table);
  void clear();
  int64_t size() const { return places_.size(); }
  uint64_t epoch() const { return epoch_; }  // places are void when it has changed

 private:
  static int64_t key(int32_t table, uint32_t row) { return (static_cast<int64_t>(table) << 32) | row; }

  IdMap places_;  // key -> place (as the entry's row)
  ChunkedMemory sums_;
  std::vector<uint32_t> free_;
  uint32_t used_ = 0;  // places ever handed out
  std::vector<Spilled> sorted_;
  bool sorted_valid_ = false;
  uint64_t epoch_ = 0;
};

class Window {
 public:
  Window(int64_t dim, int64_t slots) : dim_(dim), flags_(static_cast<size_t>(slots)), spilled_(dim) {}

  bool empty() const { return resident_ == 0 && spilled_.size() == 0; }
  void mark(int64_t slot) {
    if (flags_[slot] == 0) slots_.push_back(static_cast<int32_t>(slot));
    resident_ += flags_[slot] == 0;
    flags_[slot] = 1;
  }

  // A plan's rows take their sums with them. reserve() takes all memory for `out` rows that leave and `in`
  // that come, and says how many of them have sums at most.
  struct Bound {
    int64_t out, in;
  };
  Bound bound(int64_t out, int64_t in) const;
  void reserve(const Bound& bound, PlanBuffers* plan);
  void move(PlanBuffers* plan) noexcept;
  void undo(PlanBuffers* plan) noexcept;
  void finish(const PlanBuffers& plan) noexcept;  // applied: the sums that came back are on the device

  // [rows, 2 * dim] sums of the plan's rows. Sums that come back stay here until finish().
  void write(const PlanBuffers& plan, const float* sums);
  void read(const PlanBuffers& plan, float* sums) const;

  std::vector<int32_t> resident_slots() const;  // ascending
  const std::vector<SpilledSums::Spilled>& spilled() { return spilled_.sorted(); }
  const float* sums(uint32_t place) const { return spilled_.data(place); }
  // Rows that are away and have no sums get these, [count, 2 * dim]. Throws std::bad_alloc.
  void put_spilled(int32_t table, const int64_t* rows, int64_t count, const float* sums);
  void drop_slots(int64_t begin, int64_t end) noexcept;
  void drop_table(int32_t table) { spilled_.drop_table(table); }
  bool has(int32_t table, uint32_t row, int64_t slot) const {  // slot: -1 when it has none
    return slot >= 0 ? flags_[slot] != 0 : spilled_.has(table, row);
  }
  void close();

 private:
  void clear(int64_t slot) {
    resident_ -= flags_[slot];
    flags_[slot] = 0;
  }

  int64_t dim_;
  HugeArray<uint8_t> flags_;    // [slots] the row has sums
  int64_t resident_ = 0;        // flags set
  std::vector<int32_t> slots_;  // all of those; some twice, some whose flag was taken back
  SpilledSums spilled_;
};

}  // namespace rec_sdk
