// The interface of cache replacement policies, which choose the victims in the device cache. A policy is one
// file and one line in cache_policy.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torch_npu_ext/engine/policy/future_uses.h"
#include "torch_npu_ext/engine/policy/slot_uses.h"

namespace rec_sdk {

// The replacement policy of one table. Slots have the group's numbers. A batch that needs free slots calls
// evict() and remove(), a batch with misses calls insert(), and every batch finally calls touch(). No call
// may fail; the constructor allocates all memory.
class CachePolicy {
 public:
  virtual ~CachePolicy() = default;

  // Chooses `count` slots that have a row and are not pinned, and clears their uses. The caller ensures that
  // there are enough. `uses` contains the batch that used each slot last, including the current batch.
  // `future` contains the announced batch that needs a slot next, for policies that look ahead.
  virtual void evict(int64_t count, SlotUses* uses, const FutureUses& future,
                     uint32_t* victims /*[count]*/) noexcept = 0;

  // Called for rows that leave their slots, and for rows that get one; also when a batch is cancelled.
  virtual void remove(const uint32_t* /*slots, [count]*/, const uint32_t* /*rows, [count]*/,
                      int64_t /*count*/) noexcept {}
  virtual void insert(const uint32_t* /*slots, [count]*/, const uint32_t* /*rows, [count]*/,
                      int64_t /*count*/) noexcept {}

  // Called with the slots that a batch uses, including new ones, each once; for policies that need more than
  // the last use.
  virtual void touch(const uint32_t* /*slots, [count]*/, int64_t /*count*/) noexcept {}

  // Returns the heat of a row: the number of batches that used it, with older ones counting less; 0 if the
  // policy does not count. warm() sets the heats of rows that were inserted without a batch; `uses` has the
  // latest batch as their last use.
  virtual float heat(uint32_t /*slot*/, const SlotUses& /*uses*/) const noexcept { return 0; }
  virtual void warm(const uint32_t* /*slots, [count]*/, const float* /*heats, [count]*/, int64_t /*count*/,
                    const SlotUses& /*uses*/) noexcept {}

  virtual void clear() noexcept {}  // called when no row is cached any more

  virtual bool looks_ahead() const { return false; }  // whether it uses announced batches
};

std::vector<std::string> cache_policy_names();  // the default policy is first
// Throws std::invalid_argument for an unknown name.
std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name, int64_t first_slot, int64_t slots);

}  // namespace rec_sdk
