// Which rows leave the device cache. A new policy is one file, and one line in cache_policy.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace rec_sdk {

// One per table. Slots are the group's slot numbers, those of the table only. A batch calls touch (its hits),
// evict, then touch (the rows it brought in). None of them may fail: memory is taken by the constructor.
class CachePolicy {
 public:
  virtual ~CachePolicy() = default;

  // The batch uses these rows; every slot at most once per batch.
  virtual void touch(const uint32_t* slots /*[count]*/, int64_t count) noexcept = 0;

  // Chooses `count` resident rows with pins[slot] == 0 and forgets them. The caller knows that there are so
  // many.
  virtual void evict(int64_t count, const uint32_t* pins /*[group slots]*/,
                     uint32_t* victims /*[count]*/) noexcept = 0;

  // These rows are not resident any more.
  virtual void forget(const uint32_t* slots /*[count]*/, int64_t count) noexcept = 0;

  virtual void clear() noexcept = 0;  // no row is resident any more
};

// Throws std::invalid_argument when there is no such policy.
std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name, int64_t first_slot, int64_t slots);

}  // namespace rec_sdk
