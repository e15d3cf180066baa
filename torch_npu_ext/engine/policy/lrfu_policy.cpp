#include "torch_npu_ext/engine/policy/lrfu_policy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

namespace rec_sdk {
namespace {

// A score has this many units per factor of two. With finer units, the hit rate was not better. The clock
// advances by one unit per use of each slot, on average, so a use counts half after eight uses per slot.
constexpr int64_t kUnitsPerDouble = 8;
constexpr int64_t kGhostsPerSlot = 8;
constexpr int64_t kStart = 128, kOldest = 127, kLatest = 190, kMoved = 64;

// By how much a use raises the larger of score and clock: log2(1 + 2^-d) if the two differ by d factors of
// two, and 0 for large d.
using Gains = std::array<uint8_t, 64>;
Gains make_gains() {
  Gains gains{};
  for (size_t d = 0; d + 1 < gains.size(); ++d) {
    const double distance = static_cast<double>(d) / kUnitsPerDouble;
    gains[d] = static_cast<uint8_t>(std::lround(kUnitsPerDouble * std::log2(1.0 + std::exp2(-distance))));
  }
  return gains;
}
const Gains kGains = make_gains();

// Tabulates 2^(units / kUnitsPerDouble) for differences of scores, because a save needs the heats of all
// slots.
constexpr int64_t kMostUnits = 256;
using Powers = std::array<float, 2 * kMostUnits>;
Powers make_powers() {
  Powers powers{};
  for (size_t i = 0; i < powers.size(); ++i) {
    const double units = static_cast<double>(static_cast<int64_t>(i) - kMostUnits);
    powers[i] = static_cast<float>(std::exp2(units / kUnitsPerDouble));
  }
  return powers;
}
const Powers kPowers = make_powers();
}  // namespace

LrfuPolicy::LrfuPolicy(int64_t first_slot, int64_t slots)
    : queue_(first_slot, slots),
      first_slot_(static_cast<uint32_t>(first_slot)),
      slots_(slots),
      scores_(static_cast<size_t>(slots)),
      ghost_count_(static_cast<uint32_t>(std::min<int64_t>(kGhostsPerSlot * slots, kMaxRows))),
      ghosts_(ghost_count_) {}

void LrfuPolicy::evict(int64_t count, SlotUses* uses, const FutureUses&, uint32_t* victims) noexcept {
  begin_counting(*uses);
  queue_.evict(count, uses, ByScore{scores()}, victims);
}

// Starts counting at the first eviction. Before that only the last use of each row is known, so the first
// scores are derived from it.
void LrfuPolicy::begin_counting(const SlotUses& uses) noexcept {
  if (counting_) return;
  counting_ = true;
  clock_ = kStart;
  for (int64_t i = 0; i < slots_; ++i) {
    const int64_t age = uses.epoch() - uses.last_batch(first_slot_ + i);
    scores_[i] = static_cast<Score>(kStart - std::min(age, kOldest));
  }
}

// Scores are bytes, which may alias any object. Members that the loops below read are therefore copied to
// local variables.
void LrfuPolicy::remove(const uint32_t* slots, const uint32_t* rows, int64_t count) noexcept {
  if (!counting_) return;
  const Score* const of_slots = scores();
  const Ghosts of_rows = ghosts();
  for (int64_t i = 0; i < count; ++i) of_rows[rows[i]] = of_slots[slots[i]];
}

void LrfuPolicy::insert(const uint32_t* slots, const uint32_t* rows, int64_t count) noexcept {
  if (!counting_) return;
  Score* const of_slots = scores();
  const Ghosts of_rows = ghosts();
  for (int64_t i = 0; i < count; ++i) of_slots[slots[i]] = of_rows[rows[i]];
}

void LrfuPolicy::touch(const uint32_t* slots, int64_t count) noexcept {
  if (!counting_) return;
  advance(count);
  Score* const of_slots = scores();
  const int32_t clock = static_cast<int32_t>(clock_);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t score = of_slots[slots[i]];
    const size_t apart = std::min<size_t>(static_cast<size_t>(std::abs(score - clock)), kGains.size() - 1);
    of_slots[slots[i]] = static_cast<Score>(std::max(score, clock) + kGains[apart]);
  }
}

void LrfuPolicy::advance(int64_t uses) noexcept {
  uses_ += uses;
  clock_ += uses_ / slots_;
  uses_ %= slots_;
  if (clock_ < kLatest) return;
  clock_ -= kMoved;
  const auto move_down = [](Score score) {
    return static_cast<Score>(score > kMoved ? score - kMoved : std::min<Score>(score, 1));
  };
  std::transform(scores_.data(), scores_.data() + slots_, scores_.data(), move_down);
  std::transform(ghosts_.data(), ghosts_.data() + ghost_count_, ghosts_.data(), move_down);
}

// Returns the heat of the row in a slot, where one use now counts 1: two to the power of score minus clock.
float LrfuPolicy::heat(uint32_t slot, const SlotUses& uses) const noexcept {
  const int64_t age = std::min<int64_t>(uses.epoch() - uses.last_batch(slot), kOldest);
  const int64_t beyond = counting_ ? scores()[slot] - clock_ : -age;
  return kPowers[static_cast<size_t>(std::clamp(beyond, -kMostUnits, kMostUnits - 1) + kMostUnits)];
}

void LrfuPolicy::warm(const uint32_t* slots, const float* heats, int64_t count,
                      const SlotUses& uses) noexcept {
  begin_counting(uses);
  Score* const of_slots = scores();
  for (int64_t i = 0; i < count; ++i) {
    const double least = std::exp2(-static_cast<double>(kOldest) / kUnitsPerDouble);
    const double units = kUnitsPerDouble * std::log2(std::max<double>(heats[i], least));
    const int64_t score = clock_ + std::lround(std::min<double>(units, kOldest));
    of_slots[slots[i]] = static_cast<Score>(std::clamp<int64_t>(score, 1, ByScore::kMost));
  }
}

void LrfuPolicy::clear() noexcept {
  queue_.clear();
  if (counting_)
    std::fill(ghosts_.data(), ghosts_.data() + ghost_count_, kNone);  // because rows get new numbers
}

std::unique_ptr<CachePolicy> make_lrfu_policy(int64_t first_slot, int64_t slots) {
  return std::make_unique<LrfuPolicy>(first_slot, slots);
}

}  // namespace rec_sdk
