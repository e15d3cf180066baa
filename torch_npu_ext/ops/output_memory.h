// Memory of large outputs on the CPU, which later outputs take over.
//
// malloc returns large blocks to the system, which has to clear and map the pages of the next one: that takes
// longer than the lookup that fills them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "torch_npu_ext/ops/check.h"

namespace rec_sdk {

// Blocks that no tensor uses any more. Called from any thread.
class OutputMemory {
 public:
  struct Block {
    void* data;
    size_t bytes;
  };

  static OutputMemory& instance();
  Block take(size_t bytes);  // at least so many, in huge pages; without data where memory is short
  void give(const Block& block) noexcept;
  size_t kept_bytes();

 private:
  struct Free {
    Block block;
    uint64_t since;  // blocks that were taken before it came
  };
  // A batch has an output for each group of tables, and training a few batches at a time.
  static constexpr size_t kMost = 8;
  // A block that so many others were taken instead of goes back to the system.
  static constexpr uint64_t kPatience = 64;

  // A process that forked while another thread held the mutex must not wait for it.
  std::unique_lock<std::mutex> try_lock() { return std::unique_lock<std::mutex>(mutex_, std::try_to_lock); }
  void drop_old() noexcept;
  void drop_all() noexcept;

  std::mutex mutex_;
  std::vector<Free> free_;  // oldest first
  uint64_t taken_ = 0;
};

// Uninitialized float32 [rows, columns] on the device of `like`.
Tensor empty_output(const Tensor& like, int64_t rows, int64_t columns);

}  // namespace rec_sdk
