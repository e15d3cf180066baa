// LRFU (least recently and frequently used): every batch that used a row counts, and the count decays with
// time (D. Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least
// frequently used policies", IEEE Transactions on Computers 50(12), 2001). Scores of evicted rows are kept
// for a while, so that a row that is repeatedly evicted and fetched can become hot.
#pragma once

#include "torch_npu_ext/engine/policy/cache_policy.h"
#include "torch_npu_ext/engine/policy/victim_queue.h"

namespace rec_sdk {

// Orders victims by ascending score.
struct ByScore {
  static constexpr uint32_t kMost = 255;
  const uint8_t* scores;  // indexed from slot 0
  uint32_t key(uint32_t slot, uint32_t) const { return scores[slot]; }
  static uint32_t base(uint32_t) { return 0; }
  static bool deferred(uint32_t) { return false; }
  static std::pair<uint32_t, uint32_t> range(uint32_t, uint32_t) { return {0, kMost}; }
};

// The LRFU policy, which is also the base class of LookAheadPolicy.
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
  // The logarithm of a row's sum of uses, in which a use counts half after one half-life. Instead of letting
  // scores decay, a clock advances with the uses: the score of an unused row stays constant, and scores of
  // different times can be compared. To stay in range, all scores and the clock are lowered together from
  // time to time.
  using Score = uint8_t;
  static constexpr Score kNone = 0;

  Score* scores() const { return scores_.data() - first_slot_; }  // indexed from slot 0
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
  HugeArray<Score> ghosts_;  // scores of evicted rows; in a large table, several rows share an entry
  bool counting_ = false;    // not before the first eviction: tables that fit into the cache cost nothing
  int64_t clock_ = 0;        // the score of a single use now
  int64_t uses_ = 0;         // number of uses since the clock's last step
};

}  // namespace rec_sdk
