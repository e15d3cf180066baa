// Least recently and frequently used first: every batch that used a row counts, the less the longer ago it
// was. (D. Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least
// frequently used policies", IEEE Transactions on Computers 50(12), 2001.) Rows that left keep their score
// for a while, so that one that comes and goes can earn its place.
#pragma once

#include "torch_npu_ext/engine/policy/cache_policy.h"
#include "torch_npu_ext/engine/policy/victim_queue.h"

namespace rec_sdk {

// The row of the lowest score leaves first.
struct ByScore {
  static constexpr uint32_t kMost = 255;
  const uint8_t* scores;  // of slot 0
  uint32_t key(uint32_t slot, uint32_t) const { return scores[slot]; }
  static uint32_t base(uint32_t) { return 0; }
  static bool waits(uint32_t) { return false; }
  static std::pair<uint32_t, uint32_t> range(uint32_t, uint32_t) { return {0, kMost}; }
};

class LrfuPolicy : public CachePolicy {
 public:
  LrfuPolicy(int64_t first_slot, int64_t slots);

  void evict(int64_t count, SlotUses* uses, const FutureUses& future, uint32_t* victims) noexcept override;
  void remove(const uint32_t* slots, const uint32_t* rows, int64_t count) noexcept override;
  void insert(const uint32_t* slots, const uint32_t* rows, int64_t count) noexcept override;
  void touch(const uint32_t* slots, int64_t count) noexcept override;
  float heat(uint32_t slot, const SlotUses& uses) const noexcept override;
  void warm(const uint32_t* slots, const float* heats, int64_t count, const SlotUses& uses) noexcept override;
  void clear() noexcept override;

 protected:
  // The logarithm of a sum of uses, each of which counts half as much one half-life later. Measured against
  // a clock that goes on with the uses, it stays the same while a row is not used: scores of different times
  // compare as they are. So that all of them fit, they are moved down together once in a while.
  using Score = uint8_t;
  static constexpr Score kNone = 0;

  Score* scores() const { return scores_.data() - first_slot_; }  // of slot 0
  void begin_counting(const SlotUses& uses) noexcept;

  VictimQueue queue_;

 private:
  struct Ghosts {
    Score* scores;
    uint32_t count;
    Score& operator[](uint32_t row) const { return scores[row < count ? row : row % count]; }
  };
  Ghosts ghosts() const { return {ghosts_.data(), ghost_count_}; }
  void advance(int64_t uses) noexcept;

  uint32_t first_slot_;
  int64_t slots_;
  HugeArray<Score> scores_;
  uint32_t ghost_count_;
  HugeArray<Score> ghosts_;  // of rows that left; several rows share one in a large table, the latest has it
  bool counting_ = false;    // not before the first eviction: a table whose rows all fit pays nothing
  int64_t clock_ = 0;        // what a use now counts
  int64_t uses_ = 0;         // since the clock's last step
};

}  // namespace rec_sdk
