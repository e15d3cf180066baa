// The range allocator compared with a model that marks every unit as taken or free.
#include <random>
#include <vector>

#include "acl/range_allocator.h"
#include "check.h"

using rec_sdk::emulator::RangeAllocator;

namespace {

constexpr uint64_t kUnit = RangeAllocator::kAlignment;

struct Model {
  std::vector<bool> taken;

  // Best fit, the lowest of equals.
  uint64_t allocate(uint64_t units) {
    uint64_t best = RangeAllocator::kNone, best_size = UINT64_MAX;
    for (uint64_t begin = 0; begin < taken.size();) {
      uint64_t end = begin;
      while (end < taken.size() && !taken[end]) {
        ++end;
      }
      if (end - begin >= units && end - begin < best_size) {
        best = begin;
        best_size = end - begin;
      }
      begin = end + 1;
    }
    if (best != RangeAllocator::kNone) {
      mark(best, units, true);
    }
    return best;
  }

  void mark(uint64_t begin, uint64_t units, bool value) {
    for (uint64_t i = begin; i < begin + units; ++i) {
      CHECK(taken[i] != value);
      taken[i] = value;
    }
  }
};

void test_random(unsigned seed) {
  constexpr uint64_t kUnits = 200;
  std::mt19937 random(seed);
  RangeAllocator allocator(kUnits * kUnit + 100);  // the odd bytes at the end are not used
  Model model{std::vector<bool>(kUnits, false)};
  std::vector<std::pair<uint64_t, uint64_t>> live;
  uint64_t used = 0;
  for (int step = 0; step < 3000; ++step) {
    if (live.empty() || random() % 100 < 55) {
      const uint64_t bytes = 1 + random() % (30 * kUnit);
      const uint64_t units = (bytes + kUnit - 1) / kUnit;
      const uint64_t offset = allocator.allocate(bytes);
      const uint64_t expected = model.allocate(units);
      CHECK(expected == RangeAllocator::kNone ? offset == expected : offset == expected * kUnit);
      if (offset != RangeAllocator::kNone) {
        live.push_back({offset, units});
        used += units * kUnit;
      }
    } else {
      const size_t which = random() % live.size();
      const auto [offset, units] = live[which];
      live[which] = live.back();
      live.pop_back();
      CHECK(allocator.release(offset));
      CHECK(!allocator.release(offset));
      model.mark(offset / kUnit, units, false);
      used -= units * kUnit;
    }
    CHECK(allocator.used() == used);
  }
  for (const auto& [offset, units] : live) {
    CHECK(allocator.release(offset));
  }
  CHECK(allocator.used() == 0);
  CHECK(allocator.largest_free() == kUnits * kUnit);  // all free ranges are merged again
}

void test_edges() {
  RangeAllocator allocator(4 * kUnit);
  CHECK(allocator.allocate(0) == RangeAllocator::kNone);
  CHECK(allocator.allocate(UINT64_MAX) == RangeAllocator::kNone);
  CHECK(allocator.allocate(4 * kUnit + 1) == RangeAllocator::kNone);
  CHECK(allocator.allocate(4 * kUnit) == 0);
  CHECK(allocator.largest_free() == 0);
  CHECK(allocator.allocate(1) == RangeAllocator::kNone);
  CHECK(!allocator.release(kUnit));
  CHECK(allocator.release(0));
}

}  // namespace

int main() {
  test_edges();
  for (unsigned seed = 0; seed < 20; ++seed) {
    test_random(seed);
  }
  return check_result();
}
