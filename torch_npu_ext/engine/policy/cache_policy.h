// The interface of cache replacement policies, which choose the victims in the device cache. Each policy is
// one file and one line in cache_policy.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torch_npu_ext/engine/policy/future_uses.h"
#include "torch_npu_ext/engine/policy/slot_uses.h"

namespace rec_sdk {

// The replacement policy of one table. Slots have the group's numbers. For each batch, the planner calls
// evict() and remove() if it needs free slots, then insert() if it has misses, and finally touch(). None of
// these calls may fail, so the constructor allocates all memory.
class CachePolicy {
 public:
  virtual ~CachePolicy() = default;

  // Chooses `count` slots as victims, which have a row and are not pinned, and clears their uses. The caller
  // ensures that there are enough such slots. `uses` contains the last batch that used each slot, possibly
  // the current batch. `future` contains the next announced batch that needs each slot, for policies that
  // look ahead.
  virtual void evict(int64_t count, SlotUses* uses, const FutureUses& future,
                     uint32_t* victims /*[count]*/) noexcept = 0;

  // remove() is called for rows that lose their slots, insert() for rows that get one. Cancelling a batch
  // calls them too.
  virtual void remove(const uint32_t* /*slots, [count]*/, const uint32_t* /*rows, [count]*/,
                      int64_t /*count*/) noexcept {}
  virtual void insert(const uint32_t* /*slots, [count]*/, const uint32_t* /*rows, [count]*/,
                      int64_t /*count*/) noexcept {}

  // Called with the slots that a batch uses, each slot once, including slots of new rows. For policies that
  // need more than the last use of each slot.
  virtual void touch(const uint32_t* /*slots, [count]*/, int64_t /*count*/) noexcept {}

  // heat() returns the heat of the row in a slot: the number of batches that used it, older batches counting
  // less; 0 if the policy does not count uses. warm() sets the heats of rows that cache warming inserted,
  // whose last use in `uses` is the latest batch.
  virtual float heat(uint32_t /*slot*/, const SlotUses& /*uses*/) const noexcept { return 0; }
  virtual void warm(const uint32_t* /*slots, [count]*/, const float* /*heats, [count]*/, int64_t /*count*/,
                    const SlotUses& /*uses*/) noexcept {}

  virtual void clear() noexcept {}  // called when all rows were removed from the cache

  virtual bool looks_ahead() const { return false; }  // whether the policy uses announced batches
};

std::vector<std::string> cache_policy_names();  // the default policy is first
// Throws std::invalid_argument for an unknown name.
std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name, int64_t first_slot, int64_t slots);

}  // namespace rec_sdk
