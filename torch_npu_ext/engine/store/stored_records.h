// Records as the host store keeps them: those of the cache, but for the type of the weight, which may differ.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>

#include "op_kernels/common/record.h"

namespace rec_sdk {

class StoredRecords {
 public:
  // `cached`: the layout that everyone but the store uses; `stored`: of the weights in the store, if it is
  // another.
  explicit StoredRecords(const RecordLayout& cached, std::optional<DType> stored = {});

  int64_t bytes() const { return stored_.bytes; }
  // A weight is rounded to the nearest that the other type has.
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
  int64_t state_bytes_;  // of all states, which are alike in both
  bool same_;
};

}  // namespace rec_sdk
