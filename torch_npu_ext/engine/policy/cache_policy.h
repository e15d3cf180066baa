// The rows that leave the device cache are chosen by a policy: one file, and one line in cache_policy.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torch_npu_ext/engine/policy/future_uses.h"
#include "torch_npu_ext/engine/policy/slot_uses.h"

namespace rec_sdk {

// One per table. Slots are the group's slot numbers, those of the table only. A batch that needs room calls
// evict and leave; one that brings rows in, enter; every batch calls touch in the end. None of them may fail:
// memory is taken by the constructor.
class CachePolicy {
 public:
  virtual ~CachePolicy() = default;

  // Chooses `count` slots that have a row and are not held, and forgets their uses. The caller knows that
  // there are so many. `uses` says which batch used a slot last; the current one is there already. `future`
  // says which announced batch needs it next, if the policy looks ahead.
  virtual void evict(int64_t count, SlotUses* uses, const FutureUses& future,
                     uint32_t* victims /*[count]*/) noexcept = 0;

  // Rows that go from their slots, and rows that come to theirs; a batch that is cancelled calls these too.
  virtual void remove(const uint32_t* /*slots, [count]*/, const uint32_t* /*rows, [count]*/,
                      int64_t /*count*/) noexcept {}
  virtual void insert(const uint32_t* /*slots, [count]*/, const uint32_t* /*rows, [count]*/,
                      int64_t /*count*/) noexcept {}

  // The batch used these rows, the ones that it brought in included; each is named once. For a policy that
  // needs to know more than the last use.
  virtual void touch(const uint32_t* /*slots, [count]*/, int64_t /*count*/) noexcept {}

  // In how many batches a row was used, of which those of long ago count less; 0 from a policy that counts
  // none. And rows with such heats, here or elsewhere, which insert() was told of for no batch: `uses` says
  // that the latest batch used them.
  virtual float heat(uint32_t /*slot*/, const SlotUses& /*uses*/) const noexcept { return 0; }
  virtual void warm(const uint32_t* /*slots, [count]*/, const float* /*heats, [count]*/, int64_t /*count*/,
                    const SlotUses& /*uses*/) noexcept {}

  virtual void clear() noexcept {}  // no row is resident any more

  virtual bool looks_ahead() const { return false; }  // whether it asks which announced batch needs a row
};

std::vector<std::string> cache_policy_names();  // the default first
// Throws std::invalid_argument when there is no such policy.
std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name, int64_t first_slot, int64_t slots);

}  // namespace rec_sdk
