#include "torch_npu_ext/engine/plan/home.h"

namespace rec_sdk {

std::string wrong_home(const Home& home, int64_t ranks) {
  if (ranks < 1) return "world_size must be at least 1, got " + std::to_string(ranks);
  if (home.rank < kContinuous || home.rank >= ranks) {
    return "rank " + std::to_string(home.rank) + " of " + std::to_string(ranks) + " cannot be";
  }
  if ((home.rank == kContinuous) != (home.block > 0)) {
    return "a block of " + std::to_string(home.block) + " ids cannot be for rank " +
           std::to_string(home.rank);
  }
  return "";
}

void ranks_of(const Home& home, int64_t ranks, const int64_t* ids, int64_t n, int64_t* result) {
  with_home(home, ranks, [&](const auto& rank_of) {
    for (int64_t i = 0; i < n; ++i) result[i] = rank_of(ids[i]);
  });
}

}  // namespace rec_sdk
