// Which rank of a sharded table is home to an id.
#pragma once

#include <cstdint>
#include <string>

#include "torch_npu_ext/engine/base/id_hash.h"

namespace rec_sdk {

// In place of a rank, where ids of a table have different ones.
constexpr int32_t kModulo = -1;      // id mod W, by floor
constexpr int32_t kHash = -2;        // a hash of the id, for ids that have a stride
constexpr int32_t kContinuous = -3;  // id / block, and id mod W beyond the blocks

struct OwnerRule {
  int32_t rank;       // of all ids, or one of the above
  int64_t block = 0;  // kContinuous: ids of a rank, at least 1
};

// "" or what is wrong with it among W ranks.
std::string owner_rule_error(const OwnerRule& rule, int64_t ranks);

namespace owner_detail {

REC_SDK_ALWAYS_INLINE int64_t modulo(int64_t id, int64_t ranks) {
  const int64_t rest = id % ranks;
  return rest < 0 ? rest + ranks : rest;
}

// A factor of its own: the map of a rank's ids must not find them side by side. Saves do not depend on it,
// state dicts of ranks do.
REC_SDK_ALWAYS_INLINE int64_t hashed(int64_t id, int64_t ranks) {
  return static_cast<int64_t>(
      IdSeed::home(IdSeed::hash(id), 0xBF58476D1CE4E5B9ull, static_cast<uint64_t>(ranks)));
}

}  // namespace owner_detail

// Calls use(rank_of), where rank_of(id) is the rank that is home to an id: so the rule is chosen once.
template <class Use>
void with_owner_rule(const OwnerRule& rule, int64_t ranks, const Use& use) {
  if (rule.rank == kHash) {
    use([ranks](int64_t id) { return owner_detail::hashed(id, ranks); });
  } else if (rule.rank == kContinuous) {
    const int64_t block = rule.block;
    use([block, ranks](int64_t id) {
      const int64_t rank = id / block;
      return id >= 0 && rank < ranks ? rank : owner_detail::modulo(id, ranks);
    });
  } else if (rule.rank != kModulo) {
    use([rank = int64_t{rule.rank}](int64_t) { return rank; });
  } else if ((ranks & (ranks - 1)) == 0) {
    use([ranks](int64_t id) { return id & (ranks - 1); });  // two's complement: by floor
  } else {
    use([ranks](int64_t id) { return owner_detail::modulo(id, ranks); });
  }
}

// The rank of each of n ids.
void owner_ranks(const OwnerRule& rule, int64_t ranks, const int64_t* ids, int64_t n, int64_t* result);

}  // namespace rec_sdk
