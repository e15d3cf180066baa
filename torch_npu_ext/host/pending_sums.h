// Pending gradients of rows that left the cache inside an accumulation window: (table, row) -> sum and
// compensation.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_npu_ext/host/id_map.h"
#include "torch_npu_ext/host/memory.h"

namespace rec_sdk {

class PendingSums {
 public:
  static constexpr uint32_t kNone = 0xFFFFFFFFu;
  struct Away {
    int64_t key;  // table << 32 | row: ordered by table, then row
    uint32_t place;
    int32_t table() const { return static_cast<int32_t>(key >> 32); }
    uint32_t row() const { return static_cast<uint32_t>(key); }
  };

  explicit PendingSums(int64_t dim);

  void reserve(int64_t extra);                 // room for `extra` more rows: put() cannot fail then
  uint32_t put(int32_t table, uint32_t row);   // the row left; its sums go to data() of the returned place
  uint32_t take(int32_t table, uint32_t row);  // the row came back: its place, which stays in use, or kNone
  bool has(int32_t table, uint32_t row) const {
    return static_cast<bool>(places_.find(key(table, row), IdMap::hash(key(table, row))));
  }
  void put_back(int32_t table, uint32_t row, uint32_t place);  // undoes take(), before anything else is put
  void free(uint32_t place) { free_.push_back(place); }
  float* data(uint32_t place) const { return static_cast<float*>(sums_.at(place)); }  // [2 * dim]

  const std::vector<Away>& sorted();  // all rows away
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
  std::vector<Away> sorted_;
  bool sorted_valid_ = false;
  uint64_t epoch_ = 0;
};

}  // namespace rec_sdk
