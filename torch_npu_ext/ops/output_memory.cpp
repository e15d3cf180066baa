#include "torch_npu_ext/ops/output_memory.h"

#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>

namespace rec_sdk {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLargeOutput = size_t{4} << 20;  // malloc reuses most smaller blocks itself
constexpr int64_t kMostElements =
    std::numeric_limits<int64_t>::max() / 8;  // so that sizes in bytes cannot overflow

// Rounds a size up to a multiple of a step, so that outputs of slightly different size can use the same
// block. The step is one huge page, or for large blocks between an eighth and a quarter of the size.
size_t block_bytes(size_t bytes) {
  size_t step = kHugePage;
  while (step * 8 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

OutputMemory::Block allocate(size_t bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, kHugePage, bytes) != 0) return {nullptr, 0};
#ifdef MADV_HUGEPAGE
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return {data, bytes};
}

}  // namespace

// Returns an object that is never destroyed, because tensors may be destroyed after static objects.
OutputMemory& OutputMemory::instance() {
  static OutputMemory* const memory = new OutputMemory;
  return *memory;
}

OutputMemory::Block OutputMemory::take(size_t bytes) {
  bytes = block_bytes(bytes);
  if (const auto guard = try_lock()) {
    ++taken_;
    // The block of this size that was returned last is taken, as it is most likely still in the processor's
    // caches.
    const auto fits = [bytes](const Free& free) { return free.block.bytes == bytes; };
    const auto found = std::find_if(free_.rbegin(), free_.rend(), fits);
    if (found != free_.rend()) {
      const Block block = found->block;
      free_.erase(std::next(found).base());
      drop_old();
      return block;
    }
    drop_old();
  }
  Block block = allocate(bytes);
  if (block.data == nullptr) {
    drop_all();
    block = allocate(bytes);
  }
  return block;
}

void OutputMemory::give(const Block& block) noexcept {
  if (const auto guard = try_lock()) {
    try {
      free_.reserve(kMost + 1);
      free_.push_back({block, taken_});
      drop_old();
      return;
    } catch (const std::bad_alloc&) {
    }
  }
  std::free(block.data);
}

void OutputMemory::drop_old() noexcept {
  while (!free_.empty() && (free_.size() > kMost || taken_ - free_.front().since > kPatience)) {
    std::free(free_.front().block.data);
    free_.erase(free_.begin());
  }
}

void OutputMemory::drop_all() noexcept {
  if (const auto guard = try_lock()) {
    for (const Free& free : free_) std::free(free.block.data);
    free_.clear();
  }
}

size_t OutputMemory::kept_bytes() {
  const std::lock_guard<std::mutex> guard(mutex_);
  size_t bytes = 0;
  for (const Free& free : free_) bytes += free.block.bytes;
  return bytes;
}

Tensor empty_output(const Tensor& like, int64_t rows, int64_t columns) {
  const Checker check("empty_output", like);
  int64_t elements = 0;
  const bool fits = rows >= 0 && columns >= 0 && !__builtin_mul_overflow(rows, columns, &elements) &&
                    elements <= kMostElements;
  check.require(fits, "rows and columns are ", rows, " and ", columns,
                ", expected a shape that a tensor can have");
  const size_t bytes = 4 * static_cast<size_t>(elements);
  if (!like.is_cpu() || bytes < kLargeOutput) {
    return torch::stable::new_empty(like, {rows, columns}, ScalarType::Float);
  }
  const OutputMemory::Block block = OutputMemory::instance().take(bytes);
  check.require(block.data != nullptr, "memory is short: an output of ", rows, " x ", columns, " needs ",
                bytes, " bytes");
  return torch::stable::from_blob(block.data, {rows, columns}, {columns, 1}, like.device(), ScalarType::Float,
                                  [block](void*) { OutputMemory::instance().give(block); });
}

}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CPU, m) { m.impl("empty_output", TORCH_BOX(&rec_sdk::empty_output)); }

extern "C" __attribute__((visibility("default"))) int64_t rec_sdk_kept_output_bytes() {
  return static_cast<int64_t>(rec_sdk::OutputMemory::instance().kept_bytes());
}
