// The rules that determine the owner rank of an id in a sharded table.
#pragma once

#include <cstdint>
#include <string>

#include "torch_npu_ext/engine/base/id_hash.h"

namespace rec_sdk {

// Values of OwnerRule::rank if the owner depends on the id.
constexpr int32_t kModulo = -1;      // id mod W, by floor
constexpr int32_t kHash = -2;        // a hash of the id, for ids with a common stride
constexpr int32_t kContinuous = -3;  // id / block, and id mod W beyond the blocks

struct OwnerRule {
  int32_t rank;       // the owner of all ids, or one of the constants above
  int64_t block = 0;  // ids per rank for kContinuous, at least 1
};

// Returns "" if the rule is valid for `ranks` ranks, or an error message.
std::string owner_rule_error(const OwnerRule& rule, int64_t ranks);

namespace owner_detail {

REC_SDK_ALWAYS_INLINE int64_t modulo(int64_t id, int64_t ranks) {
  const int64_t rest = id % ranks;
  return rest < 0 ? rest + ranks : rest;
}

// Uses another seed than the id maps; otherwise the ids of one rank would be neighbours in its map. Saves do
// not depend on the seed, the state dicts of ranks do.
REC_SDK_ALWAYS_INLINE int64_t hashed(int64_t id, int64_t ranks) {
  return static_cast<int64_t>(
      IdSeed::home(IdSeed::hash(id), 0xBF58476D1CE4E5B9ull, static_cast<uint64_t>(ranks)));
}

}  // namespace owner_detail

// Calls use(rank_of), where rank_of(id) returns the owner rank of an id; the kind of rule is selected once,
// outside of loops.
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
    use([ranks](int64_t id) { return id & (ranks - 1); });  // two's complement: rounds towards minus infinity
  } else {
    use([ranks](int64_t id) { return owner_detail::modulo(id, ranks); });
  }
}

// Computes the owner rank of each of n ids.
void owner_ranks(const OwnerRule& rule, int64_t ranks, const int64_t* ids, int64_t n, int64_t* result);

}  // namespace rec_sdk
