// Records in the host store's format, which differs from the cache's format in the dtype of weights, if at
// all.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>

#include "op_kernels/common/record.h"

namespace rec_sdk {

// Converts records between the cache's and the host store's format.
class StoredRecords {
 public:
  // `cached`: the layout used outside of the store; `stored`: the dtype of weights in the store, if it
  // differs.
  explicit StoredRecords(const RecordLayout& cached, std::optional<DType> stored = {});

  int64_t bytes() const { return stored_.bytes; }
  // Weights are rounded to the nearest value of the other dtype.
  void load(const char* stored, char* record) const { move(stored_, stored, cached_, record); }
  void save(const char* record, char* stored) const { move(cached_, record, stored_, stored); }

 private:
  void move(const RecordLayout& from, const char* source, const RecordLayout& to, char* target) const {
    if (same_) {
      std::memcpy(target, source, static_cast<size_t>(stored_.bytes));
    } else {
      convert(from, source, to, target);
    }
  }
  void convert(const RecordLayout& from, const char* source, const RecordLayout& to, char* target) const;

  RecordLayout cached_, stored_;
  int64_t state_bytes_;  // bytes of all states, which are the same in both formats
  bool same_;
};

}  // namespace rec_sdk
