// Records in the format of the host store. It is the format of the cache, except that the dtype of the
// weights may differ.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>

#include "op_kernels/common/record.h"

namespace rec_sdk {

// Converter of records between the formats of the cache and the host store.
class StoredRecords {
 public:
  // `cached` is the layout of records outside of the store. `stored` is the dtype of weights in the store, if
  // it differs.
  explicit StoredRecords(const RecordLayout& cached, std::optional<DType> stored = {});

  int64_t bytes() const { return stored_.bytes; }
  // load() and save() round weights to the nearest value of the other dtype.
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
  int64_t state_bytes_;  // size of all states in bytes, which is the same in both formats
  bool same_;
};

}  // namespace rec_sdk
