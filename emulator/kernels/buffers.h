// The ranges of memory that an emulated kernel may access, without empty ones.
#pragma once

#include <cstdint>
#include <vector>

#include "emulator/ascendc/launch.h"

namespace rec_sdk::emulator {

class Buffers {
 public:
  template <class T>
  Buffers& read(const char* name, const T* data, int64_t count) {
    return add(name, data, count * static_cast<int64_t>(sizeof(T)), Access::kRead);
  }
  // Adds a range that is written completely.
  template <class T>
  Buffers& write(const char* name, const T* data, int64_t count) {
    return add(name, data, count * static_cast<int64_t>(sizeof(T)), Access::kWrite);
  }
  // Adds a range that is written in part, or also read.
  template <class T>
  Buffers& change(const char* name, const T* data, int64_t count) {
    return add(name, data, count * static_cast<int64_t>(sizeof(T)), Access::kReadWrite);
  }

  const std::vector<Buffer>& list() const { return list_; }

 private:
  // `host` is valid for host memory; launch_kernel replaces it with the address of device memory.
  Buffers& add(const char* name, const void* data, int64_t bytes, Access access) {
    if (data != nullptr && bytes > 0) {
      list_.push_back({name, data, static_cast<uint64_t>(bytes), access, const_cast<void*>(data)});
    }
    return *this;
  }

  std::vector<Buffer> list_;
};

// Returns the extent in values of `rows` rows of `columns` values, `stride` values apart.
inline int64_t values_in(int64_t rows, int64_t columns, int64_t stride) {
  return rows == 0 ? 0 : (rows - 1) * stride + columns;
}

}  // namespace rec_sdk::emulator
