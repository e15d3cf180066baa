#include "torch_npu_ext/engine/batch/plan_buffers.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace rec_sdk {
namespace {

constexpr size_t kMaxPooled = 8;  // more plans than are in flight with a deep prefetch
constexpr size_t kAlignment = 64;

// Places arrays one after another from a base address; with a null base it only computes their total size.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}

  template <class T>
  void place(T*& array, int64_t count, bool needed = true) {
    array = needed && base_ != nullptr ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    if (needed) used_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

PlanBuffers::Field::Type type_of(const int32_t*) { return PlanBuffers::Field::kInt32; }
PlanBuffers::Field::Type type_of(const int64_t*) { return PlanBuffers::Field::kInt64; }
PlanBuffers::Field::Type type_of(const float*) { return PlanBuffers::Field::kFloat32; }
PlanBuffers::Field::Type type_of(const HotSegment*) { return PlanBuffers::Field::kHotSegment; }

}  // namespace

size_t PlanBuffers::place_arrays(const PlanShape& shape, char* base) {
  const int64_t n = shape.lookups;
  Arena arena(base);
  arena.place(offsets, shape.bags + 1, shape.pooled);
  arena.place(slots, n);
  arena.place(unique_slots, shape.uniques);
  arena.place(device_table_offsets, shape.tables + 1);
  arena.place(segment_offsets, shape.uniques + 1);
  arena.place(grad_row, n);
  arena.place(grad_source, n, shape.sources);
  arena.place(grad_column, n, shape.pooled);
  arena.place(scale, n, shape.scaled);
  arena.place(positions, n, shape.pooled && shape.weighted);
  arena.place(swap_in_slots, shape.in);
  arena.place(swap_out_places, shape.in, shape.out > 0);
  arena.place(window_out_slots, shape.window_out);
  arena.place(window_in_slots, shape.window_in);
  arena.place(unique_ids, shape.uniques, shape.ids);
  arena.place(hot_segments, hot_segment_places(n));
  arena.place(origins, n, shape.origins && shape.in > 0);
  device_bytes_ = arena.used();
  arena.place(swap_out_slots, shape.out);
  arena.place(swap_out_rows, shape.out);
  arena.place(swap_out_ids, shape.out);
  arena.place(swap_in_rows, shape.in);
  arena.place(swap_in_ids, shape.in);
  arena.place(swap_in_added, shape.in);
  return arena.used();
}

size_t PlanBuffers::arena_bytes(const PlanShape& shape) { return PlanBuffers().place_arrays(shape, nullptr); }

void PlanBuffers::layout(const PlanShape& shape, ExternalArena arena) {
  const size_t needed = place_arrays(shape, nullptr);
  if (arena.data != nullptr && arena.bytes < needed) {
    throw std::invalid_argument("the arena has " + std::to_string(arena.bytes) + " bytes, the plan needs " +
                                std::to_string(needed));
  }
  if (arena.data == nullptr && needed > memory_.size()) memory_ = HugeBuffer(needed + needed / 4);
  arena_ = arena.data != nullptr ? arena.data : memory_.data();
  owner_ = std::move(arena.owner);
  place_arrays(shape, arena_);
  lookups = shape.lookups;
  bags = shape.bags;
  tables = shape.tables;
  uniques = shape.uniques;
  rows_out = shape.out;
  rows_in = shape.in;
  window_out = window_in = hot = 0;
}

std::vector<PlanBuffers::Field> PlanBuffers::device_fields() const {
  std::vector<Field> fields;
  fields.reserve(17);
  const auto add = [&](const auto* array, int64_t count) {
    const int64_t words = static_cast<int64_t>(sizeof(*array) / 4);
    const int64_t begin = array == nullptr ? -1 : (reinterpret_cast<const char*>(array) - arena_) / 4;
    fields.push_back({begin, count * words, type_of(array)});
  };
  const auto unless_empty = [&](const auto* array, int64_t count) {
    add(count > 0 ? array : nullptr, count);
  };
  add(offsets, bags + 1);
  add(slots, lookups);
  add(unique_slots, uniques);
  add(device_table_offsets, tables + 1);
  add(segment_offsets, uniques + 1);
  add(grad_row, lookups);
  add(grad_source, lookups);
  add(grad_column, lookups);
  add(scale, lookups);
  add(positions, lookups);
  unless_empty(swap_in_slots, rows_in);
  add(swap_out_places, rows_in);
  unless_empty(window_out_slots, window_out);
  unless_empty(window_in_slots, window_in);
  add(unique_ids, uniques);
  unless_empty(hot_segments, hot);
  add(origins, lookups);
  return fields;
}

std::shared_ptr<PlanBuffers> PlanPool::take() {
  std::unique_ptr<PlanBuffers> buffers;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.reserve(kMaxPooled);  // so that returning a buffer cannot fail
    if (!free_.empty()) {
      buffers = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!buffers) buffers = std::make_unique<PlanBuffers>();
  buffers->state = PlanState::kPlanned;
  buffers->finished = buffers->ended = false;
  auto pool = shared_from_this();
  return {buffers.release(), [pool](PlanBuffers* returned) { pool->give(returned); }};
}

void PlanPool::give(PlanBuffers* buffers) noexcept {
  std::unique_ptr<PlanBuffers> returned(buffers);
  returned->owner_.reset();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.size() < kMaxPooled) free_.push_back(std::move(returned));
}

}  // namespace rec_sdk
