// The hash of ids in maps with open addressing, and the detection of clustered ids.
#pragma once

#include <cstdint>

#define REC_SDK_ALWAYS_INLINE inline __attribute__((always_inline))

namespace rec_sdk {

// The seed of an id map's hash. A hash consists of two folded multiplications: the first is the same for all
// maps, and the second uses the seed. Its high bits, which choose an id's home position, depend on every bit
// of the id.
//
// Maps with the same seed store ids in the same order. If ids are inserted in the order of such a map, for
// example from a part of a save, their home positions are neighbours and searches take many steps. A map
// therefore counts the steps of its insertions, and rehashes with another seed if they are more than for ids
// in random order.
class IdSeed {
 public:
  // `usual`: how many steps beyond its home position a new id may take on average before the ids count as
  // clustered.
  explicit IdSeed(int64_t usual) : IdSeed(usual, kFirst) {}

  static REC_SDK_ALWAYS_INLINE uint64_t hash(int64_t id) {
    return fold(static_cast<uint64_t>(id) ^ kFirst, 0xD6E8FEB86659FD93ull);
  }
  static REC_SDK_ALWAYS_INLINE uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  // Maps an order, which is fold(hash, seed), to a position (Lemire's fastrange). The number of positions
  // need not be a power of two, so a map can grow by less than a factor of two.
  static REC_SDK_ALWAYS_INLINE uint64_t place(uint64_t order, uint64_t places) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(order) * places) >> 64);
  }
  static REC_SDK_ALWAYS_INLINE uint64_t home(uint64_t hash, uint64_t seed, uint64_t places) {
    return place(fold(hash, seed), places);
  }
  // Returns the smallest order that maps to this position. Precondition: place < places.
  static uint64_t least(uint64_t place, uint64_t places) {
    const unsigned __int128 scaled = static_cast<unsigned __int128>(place) << 64;
    return static_cast<uint64_t>((scaled + places - 1) / places);
  }
  REC_SDK_ALWAYS_INLINE uint64_t order(uint64_t hash) const { return fold(hash, value_); }

  uint64_t value() const { return value_; }
  // Records that a new id was put `steps` positions behind its home; `added` is the number of new ids so far.
  // Returns true if they took too many steps in total.
  bool crowds(int64_t id, uint64_t steps, int64_t added) {
    steps_ += static_cast<int64_t>(steps);
    if (steps_ <= usual_ * added + kSlack) return false;
    next_ = fold(value_ ^ static_cast<uint64_t>(id), 0xD6E8FEB86659FD93ull) | 1;
    return true;
  }
  // Returns the seed to rehash the ids with: this seed, or another one if the ids were clustered.
  IdSeed fresh() const { return IdSeed(usual_, next_); }

 private:
  static constexpr uint64_t kFirst = 0x9E3779B97F4A7C15ull;
  static constexpr int64_t kSlack = 64;  // so that a few ids do not count as clustered

  IdSeed(int64_t usual, uint64_t value) : value_(value), next_(value), usual_(usual) {}

  uint64_t value_, next_;
  int64_t usual_;
  int64_t steps_ = 0;
};

}  // namespace rec_sdk
