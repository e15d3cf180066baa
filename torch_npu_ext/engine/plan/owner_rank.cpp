#include "torch_npu_ext/engine/plan/owner_rank.h"

namespace rec_sdk {

std::string owner_rule_error(const OwnerRule& rule, int64_t ranks) {
  if (ranks < 1) return "world_size must be at least 1, got " + std::to_string(ranks);
  if (rule.rank < kContinuous || rule.rank >= ranks) {
    return "rank " + std::to_string(rule.rank) + " of " + std::to_string(ranks) + " is not valid";
  }
  if ((rule.rank == kContinuous) != (rule.block > 0)) {
    return "a block of " + std::to_string(rule.block) + " ids is not valid with rank " +
           std::to_string(rule.rank);
  }
  return "";
}

void owner_ranks(const OwnerRule& rule, int64_t ranks, const int64_t* ids, int64_t n, int64_t* result) {
  with_owner_rule(rule, ranks, [&](const auto& rank_of) {
    for (int64_t i = 0; i < n; ++i) result[i] = rank_of(ids[i]);
  });
}

}  // namespace rec_sdk
