// A cache of memory for large outputs on the CPU.
//
// malloc returns large blocks to the system, and the pages of the next block must be cleared and mapped
// again, which takes longer than the lookup that fills them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "torch_npu_ext/ops/check.h"

namespace rec_sdk {

// Blocks of destroyed outputs. May be called from any thread.
class OutputMemory {
 public:
  struct Block {
    void* data;
    size_t bytes;
  };

  static OutputMemory& instance();
  Block take(size_t bytes);  // at least `bytes` on huge pages; without data if memory is short
  void give(const Block& block) noexcept;
  size_t kept_bytes();

 private:
  struct Free {
    Block block;
    uint64_t since;  // number of blocks taken before it was returned
  };
  // A batch has one output per group of tables, and training keeps outputs of a few batches.
  static constexpr size_t kMost = 8;
  // A block is returned to the system after so many other blocks were taken since its return.
  static constexpr uint64_t kPatience = 64;

  // Does not wait for the mutex: in a forked child, a thread of the parent may hold it forever.
  std::unique_lock<std::mutex> try_lock() { return std::unique_lock<std::mutex>(mutex_, std::try_to_lock); }
  void drop_old() noexcept;
  void drop_all() noexcept;

  std::mutex mutex_;
  std::vector<Free> free_;  // oldest first
  uint64_t taken_ = 0;
};

// Allocates float32 [rows, columns], uninitialized, on the device of `like`.
Tensor empty_output(const Tensor& like, int64_t rows, int64_t columns);

}  // namespace rec_sdk
