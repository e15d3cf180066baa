// A cache of memory blocks for large outputs on the CPU.
//
// Without it, malloc would return large blocks to the system, and the system would have to clear and map the
// pages of the next block, which takes longer than the lookup that fills the block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "torch_npu_ext/ops/check.h"

namespace rec_sdk {

// Memory blocks of destroyed outputs, kept for later outputs. All functions may be called from any thread.
class OutputMemory {
 public:
  struct Block {
    void* data;
    size_t bytes;
  };

  static OutputMemory& instance();
  Block take(size_t bytes);  // returns at least `bytes`, on huge pages; data is null if memory is short
  void give(const Block& block) noexcept;
  size_t kept_bytes();

 private:
  struct Free {
    Block block;
    uint64_t since;  // value of taken_ when the block was returned
  };
  // The number of blocks that are kept: a batch has one output per group of tables, and training uses the
  // outputs of a few batches at a time.
  static constexpr size_t kMost = 8;
  // A kept block is returned to the system after this number of other blocks has been taken.
  static constexpr uint64_t kPatience = 64;

  // Does not wait for the mutex, since in a forked child it may stay locked forever by a thread of the
  // parent.
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
