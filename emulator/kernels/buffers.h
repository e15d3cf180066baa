// The ranges of memory that an emulated kernel may access. Empty ranges are left out.
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
  // Adds a range that the kernel must write completely.
  template <class T>
  Buffers& write(const char* name, const T* data, int64_t count) {
    return add(name, data, count * static_cast<int64_t>(sizeof(T)), Access::kWrite);
  }
  // Adds a range that the kernel may read, and write in part.
  template <class T>
  Buffers& change(const char* name, const T* data, int64_t count) {
    return add(name, data, count * static_cast<int64_t>(sizeof(T)), Access::kReadWrite);
  }

  const std::vector<Buffer>& list() const { return list_; }

 private:
  // Adds a range of host memory. For device memory, launch_kernel() later replaces `host` by the address of
  // its contents.
  Buffers& add(const char* name, const void* data, int64_t bytes, Access access) {
    if (data != nullptr && bytes > 0) {
      list_.push_back({name, data, static_cast<uint64_t>(bytes), access, const_cast<void*>(data)});
    }
    return *this;
  }

  std::vector<Buffer> list_;
};

// Returns the number of values from the first to the last value of `rows` rows, which have `columns` values
// each and begin `stride` values apart.
inline int64_t values_in(int64_t rows, int64_t columns, int64_t stride) {
  return rows == 0 ? 0 : (rows - 1) * stride + columns;
}

}  // namespace rec_sdk::emulator
