#include "torch_npu_ext/host/plan_buffers.h"

#include <algorithm>

namespace rec_sdk {
namespace {

constexpr size_t kMaxPooled = 8;  // plans in flight of a deep prefetch, and some to spare

// Lays arrays out one after the other; with a null base it only measures.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}

  template <class T>
  void place(T*& array, int64_t count) {
    if (base_ != nullptr) array = reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

size_t place_arrays(PlanBuffers& plan, char* base, int64_t swaps, PlanBuffers::Needs needs) {
  const int64_t n = plan.lookups;
  const int64_t of_bags = needs.pooled ? n : 0;
  Arena arena(base);
  arena.place(plan.slots, n);
  arena.place(plan.offsets, needs.pooled ? plan.bags + 1 : 0);
  arena.place(plan.unique_slots, n);
  arena.place(plan.segment_offsets, n + 1);
  arena.place(plan.grad_row, n);
  arena.place(plan.grad_column, of_bags);
  arena.place(plan.positions, needs.weighted ? of_bags : 0);
  arena.place(plan.scale, needs.scaled ? of_bags : 0);
  arena.place(plan.swap_out_slots, swaps);
  arena.place(plan.swap_out_rows, swaps);
  arena.place(plan.swap_out_ids, swaps);
  arena.place(plan.swap_in_slots, swaps);
  arena.place(plan.swap_in_rows, swaps);
  arena.place(plan.swap_in_ids, swaps);
  arena.place(plan.swap_in_added, swaps);
  return arena.used();
}

}  // namespace

void PlanBuffers::layout(int64_t lookup_count, int64_t bag_count, int64_t swaps, Needs needs) {
  lookups = lookup_count;
  bags = bag_count;
  uniques = rows_out = rows_in = 0;
  pending_out.clear();
  pending_in.clear();
  pending_out_sums.clear();
  pending_in_sums.clear();
  const size_t bytes = place_arrays(*this, nullptr, swaps, needs);
  if (bytes > memory_.size()) memory_ = HugeBuffer(bytes + bytes / 4);
  place_arrays(*this, memory_.data(), swaps, needs);
  if (!needs.pooled) {
    offsets = nullptr;
    grad_column = nullptr;
  }
  if (!needs.pooled || !needs.weighted) positions = nullptr;
  if (!needs.scaled) scale = nullptr;
}

std::shared_ptr<PlanBuffers> PlanPool::take() {
  std::unique_ptr<PlanBuffers> buffers;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.reserve(kMaxPooled);  // so that giving back cannot fail
    if (!free_.empty()) {
      buffers = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!buffers) buffers = std::make_unique<PlanBuffers>();
  auto pool = shared_from_this();
  return {buffers.release(), [pool](PlanBuffers* returned) { pool->give(returned); }};
}

void PlanPool::give(PlanBuffers* buffers) noexcept {
  std::unique_ptr<PlanBuffers> returned(buffers);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.size() < kMaxPooled) free_.push_back(std::move(returned));
}

}  // namespace rec_sdk
