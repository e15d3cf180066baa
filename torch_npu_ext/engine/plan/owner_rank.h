// Rules that determine the owner rank of an id in a sharded table.
#pragma once

#include <cstdint>
#include <string>

#include "torch_npu_ext/engine/base/id_hash.h"

namespace rec_sdk {

// The values of OwnerRule::rank for rules by which the owner depends on the id.
constexpr int32_t kModulo = -1;      // id mod W, never negative
constexpr int32_t kHash = -2;        // a hash of the id, for ids with a common stride
constexpr int32_t kContinuous = -3;  // id / block; id mod W for ids outside of the ranks' blocks

struct OwnerRule {
  int32_t rank;       // the owner of all ids, or one of the constants above
  int64_t block = 0;  // ids per rank for kContinuous, at least 1
};

// Returns an error message if the rule is invalid for `ranks` ranks; otherwise an empty string.
std::string owner_rule_error(const OwnerRule& rule, int64_t ranks);

namespace owner_detail {

REC_SDK_ALWAYS_INLINE int64_t modulo(int64_t id, int64_t ranks) {
  const int64_t rest = id % ranks;
  return rest < 0 ? rest + ranks : rest;
}

// Returns the owner rank by a hash of the id. The seed differs from the seed of id maps, in which the ids of
// a rank would otherwise be neighbours. The seed must not change: the state dicts of ranks depend on it, but
// saves do not.
REC_SDK_ALWAYS_INLINE int64_t hashed(int64_t id, int64_t ranks) {
  return static_cast<int64_t>(
      IdSeed::home(IdSeed::hash(id), 0xBF58476D1CE4E5B9ull, static_cast<uint64_t>(ranks)));
}

}  // namespace owner_detail

// Calls use(rank_of), where rank_of(id) returns the owner rank of an id. A loop in use() need not examine the
// kind of the rule for each id.
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
    use([ranks](int64_t id) { return id & (ranks - 1); });  // in two's complement, the result is not negative
  } else {
    use([ranks](int64_t id) { return owner_detail::modulo(id, ranks); });
  }
}

// Computes the owner rank of each of n ids.
void owner_ranks(const OwnerRule& rule, int64_t ranks, const int64_t* ids, int64_t n, int64_t* result);

}  // namespace rec_sdk
