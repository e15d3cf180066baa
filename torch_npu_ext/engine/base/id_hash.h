// Where ids go in a map of open addressing, and when a map has to place them in another way.
#pragma once

#include <cstdint>

#define REC_SDK_ALWAYS_INLINE inline __attribute__((always_inline))

namespace rec_sdk {

// A hash is two folded multiplications: its high bits, which choose the place, depend on every bit of the id.
// The first is the same for all maps, the second multiplies with the seed of a map. Ids that come in the
// order of another map with the same seed, such as those of a save or of a part of it, would all have their
// homes side by side; so a map counts what its searches for new ids cost, and takes another seed when that
// is more than it can be for ids in no such order. Until then all maps have the first seed, and list the same
// ids in the same order.
class IdSeed {
 public:
  // `usual`: steps beyond its home that a new id may take on the average.
  explicit IdSeed(int64_t usual) : IdSeed(usual, kFirst) {}

  static REC_SDK_ALWAYS_INLINE uint64_t hash(int64_t id) {
    return fold(static_cast<uint64_t>(id) ^ kFirst, 0xD6E8FEB86659FD93ull);
  }
  static REC_SDK_ALWAYS_INLINE uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  // Lemire's fastrange: any count of places will do, so growth need not double. `order` is fold(hash, seed).
  static REC_SDK_ALWAYS_INLINE uint64_t place(uint64_t order, uint64_t places) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(order) * places) >> 64);
  }
  static REC_SDK_ALWAYS_INLINE uint64_t home(uint64_t hash, uint64_t seed, uint64_t places) {
    return place(fold(hash, seed), places);
  }
  // The least order whose place is this one. Precondition: it is below `places`.
  static uint64_t least(uint64_t place, uint64_t places) {
    const unsigned __int128 scaled = static_cast<unsigned __int128>(place) << 64;
    return static_cast<uint64_t>((scaled + places - 1) / places);
  }
  REC_SDK_ALWAYS_INLINE uint64_t order(uint64_t hash) const { return fold(hash, value_); }

  uint64_t value() const { return value_; }
  // One of `added` new ids was put `steps` places behind its home. True when these are too many by now.
  bool crowds(int64_t id, uint64_t steps, int64_t added) {
    steps_ += static_cast<int64_t>(steps);
    if (steps_ <= usual_ * added + kSlack) return false;
    next_ = fold(value_ ^ static_cast<uint64_t>(id), 0xD6E8FEB86659FD93ull) | 1;
    return true;
  }
  // For the same ids in new places: this seed or, once they were crowded, another.
  IdSeed fresh() const { return IdSeed(usual_, next_); }

 private:
  static constexpr uint64_t kFirst = 0x9E3779B97F4A7C15ull;
  static constexpr int64_t kSlack = 64;  // few ids say nothing

  IdSeed(int64_t usual, uint64_t value) : value_(value), next_(value), usual_(usual) {}

  uint64_t value_, next_;
  int64_t usual_;
  int64_t steps_ = 0;
};

}  // namespace rec_sdk
