// A hash map from each id to its slot or, if it has no slot, to its row. It has open addressing with buckets
// of one cache line and five entries, so a lookup is one memory access in most cases. Any int64 is a valid
// id: a bit marks used entries.
//
// A large map grows incrementally, so that no batch waits until all ids have moved. Meanwhile it has two
// arrays of buckets. Home buckets have the same order in both arrays, so ids whose orders (seeded hashes) are
// below a bound are in the new array and all other ids in the old one. Each reserve() raises the bound.
#pragma once

#include <cstdint>
#include <new>
#include <utility>

#include "torch_npu_ext/engine/base/id_hash.h"
#include "torch_npu_ext/engine/base/memory.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace rec_sdk {

constexpr uint32_t kNoSlot = 0xFFFFFFFFu;
constexpr uint32_t kMaxRows = 0xFFFFFFFEu;

// Prefetches into L2. A prefetch into L1, or on x86 a prefetch for writing, would occupy one of the few L1
// miss buffers. The function must be inlined, because GCC deletes calls of functions that only prefetch.
REC_SDK_ALWAYS_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }
// Prefetches into L1, shortly before the data is used. It follows a prefetch into L2, because processors
// appear to drop some of those.
REC_SDK_ALWAYS_INLINE void prefetch_near(const void* address) { __builtin_prefetch(address, 0, 3); }

class IdMap {
 public:
  static constexpr int kLanes = 5;
  struct alignas(64) Bucket {
    int64_t id[kLanes];
    uint32_t value[kLanes];  // the slot, or the row if there is no slot
    uint8_t with_slot;       // bit l: lane l is used and has a slot
    uint8_t used;            // bit l: lane l is used, so zeroed memory is an empty bucket
  };

  // A reference to the entry of an id, or null. It is valid until the map grows or an id is erased.
  class Entry {
   public:
    Entry() : bucket_(nullptr), lane_(0) {}
    Entry(Bucket* bucket, int lane) : bucket_(bucket), lane_(lane) {}
    explicit operator bool() const { return bucket_ != nullptr; }

    bool has_slot() const { return bucket_->with_slot >> lane_ & 1; }
    uint32_t slot() const { return has_slot() ? bucket_->value[lane_] : kNoSlot; }
    uint32_t row() const { return bucket_->value[lane_]; }  // precondition: !has_slot()
    void set_slot(uint32_t slot) const {
      bucket_->value[lane_] = slot;
      bucket_->with_slot |= bit(lane_);
    }
    void set_row(uint32_t row) const {  // clears the slot
      bucket_->value[lane_] = row;
      bucket_->with_slot &= ~bit(lane_);
    }

   private:
    Bucket* bucket_;
    int lane_;
  };

  // Below `expected` ids the map grows by doubling, so that few ids move; it begins small in any case.
  explicit IdMap(int64_t expected = 0) : IdMap(buckets_for(0), IdSeed(kUsualSteps), buckets_for(expected)) {}

  static REC_SDK_ALWAYS_INLINE uint64_t hash(int64_t id) { return IdSeed::hash(id); }

  // The function from hashes to home buckets, where searches begin. It becomes invalid when ids move, either
  // in a rehash or in a step of incremental growth.
  struct Homes {
    const Bucket *buckets, *old_buckets;
    uint64_t count, old_count, bound, seed;
    REC_SDK_ALWAYS_INLINE const Bucket* of(uint64_t hash) const {
      const uint64_t order = IdSeed::fold(hash, seed);
      const bool old = order >= bound;  // compiles to a selection without a branch
      return (old ? old_buckets : buckets) + IdSeed::place(order, old ? old_count : count);
    }
    // The same for a map that does not grow.
    REC_SDK_ALWAYS_INLINE const Bucket* of_whole(uint64_t hash) const {
      return buckets + IdSeed::place(IdSeed::fold(hash, seed), count);
    }
    bool grows() const { return old_buckets != buckets; }
  };
  Homes homes() const {
    const Buckets& old = grows() ? old_ : buckets_;
    return {buckets_.data(), old.data(), buckets_.count, old.count, bound_, seed_.value()};
  }
  // Prefetches the home bucket and the bucket behind it, which find() reads if the home is full.
  REC_SDK_ALWAYS_INLINE void prefetch(uint64_t hash) const {
    const Bucket* const home = homes().of(hash);
    rec_sdk::prefetch(home);
    rec_sdk::prefetch(home + 1);
  }

  REC_SDK_ALWAYS_INLINE Entry find(int64_t id, uint64_t hash) const {
    const uint64_t order = seed_.order(hash);
    const Buckets& place = of(order);
    for (uint64_t b = place.home(order);; b = place.next(b)) {
      Bucket& bucket = place[b];
      const uint32_t lanes = lanes_of(bucket, id) & bucket.used;
      if (lanes != 0) return {&bucket, __builtin_ctz(lanes)};
      if (bucket.used != kFull) return {};
    }
  }

  // Returns the slot of `id` if `bucket` contains the id and it has a slot; otherwise kNoSlot.
  static REC_SDK_ALWAYS_INLINE uint32_t slot_at(const Bucket& bucket, int64_t id) {
    const uint32_t lanes = lanes_of(bucket, id) & bucket.with_slot;
    const uint32_t none =
        0u - ((lanes - 1) >> 31);  // kNoSlot if lanes is 0; GCC compiles a condition to a branch here
    return bucket.value[__builtin_ctz(lanes | 1u << (kLanes - 1))] | none;
  }

  // Returns the entry of `id`; a new id is added with `new_row` and no slot. Precondition: growth(1) == 0.
  Entry find_or_add(int64_t id, uint64_t hash, uint32_t new_row, bool* added) {
    const uint64_t order = seed_.order(hash);
    Buckets& place = of(order);
    const uint64_t first = place.home(order);
    for (uint64_t b = first;; b = place.next(b)) {
      Bucket& bucket = place[b];
      const uint32_t lanes = lanes_of(bucket, id) & bucket.used;
      *added = lanes == 0;
      if (lanes != 0) return {&bucket, __builtin_ctz(lanes)};
      if (bucket.used == kFull) continue;
      ++size_;
      if (b != first && seed_.crowds(id, place.distance(first, b), size_ + erased_)) room_ = kCrowded;
      return put(&bucket, id, new_row);
    }
  }

  bool erase(int64_t id, uint64_t hash) {
    const uint64_t order = seed_.order(hash);
    const Buckets& place = of(order);
    for (uint64_t b = place.home(order);; b = place.next(b)) {
      const uint32_t lanes = lanes_of(place[b], id) & place[b].used;
      if (lanes != 0) {
        close_hole(place, b, __builtin_ctz(lanes));
        --size_;
        ++erased_;
        return true;
      }
      if (place[b].used != kFull) return false;
    }
  }

  // Returns the size in bytes of the new bucket array that `extra` more ids require; 0 if they fit into the
  // present one.
  int64_t growth(int64_t extra) const {
    return size_ + extra <= room_ ? 0 : buckets_with(extra) * static_cast<int64_t>(sizeof(Bucket));
  }
  // Returns whether the map is growing incrementally, with each reserve() moving some of the ids.
  bool grows() const { return old_.count != 0; }

  // Reserves space for `extra` more ids. A growing map moves ids in proportion to `extra`.
  void reserve(int64_t extra) {
    if (size_ + extra > room_) {
      const bool at_once = grows() || room_ == kCrowded || buckets_.count < kAtOnce || extra > size_ / 32;
      at_once ? rehash(buckets_with(extra)) : begin_growth(buckets_with(extra));
    } else if (grows()) {
      move_homes(kHomesPerId * static_cast<uint64_t>(extra));
    }
  }
  // Shrinks the map if a fourth of its memory suffices.
  void shrink() noexcept {
    const int64_t wanted = buckets_for(size_ + size_ / 4);
    if (static_cast<int64_t>(buckets_.count) / 4 < wanted) return;
    try {
      rehash(wanted);
    } catch (const std::bad_alloc&) {  // the map keeps its size
    }
  }

  void clear() { *this = IdMap(buckets_for(0), IdSeed(kUsualSteps), expected_buckets_); }

  int64_t size() const { return size_; }
  // Returns the size of the map in bytes. While the map grows, this is the filled part of the new array plus
  // the remaining part of the old one.
  int64_t bytes() const {
    const double moved = grows() ? static_cast<double>(moved_) / static_cast<double>(old_.count) : 1;
    const double buckets =
        moved * static_cast<double>(buckets_.count) + (1 - moved) * static_cast<double>(old_.count);
    return static_cast<int64_t>(buckets) * static_cast<int64_t>(sizeof(Bucket));
  }

  template <class Visit>  // visit(id, entry)
  void for_each(Visit visit) const {
    for_each_from(0, bucket_count(), visit);
  }

  // Visits the entries of buckets [begin, end), with the old array last; buckets beyond
  // bucket_count() are ignored. The map must not change between the calls of one iteration.
  uint64_t bucket_count() const { return buckets_.count + old_.count; }
  template <class Visit>
  void for_each_from(uint64_t begin, uint64_t end, Visit visit) const {
    for (uint64_t b = begin; b < end && b < bucket_count(); ++b) {
      const bool old = b >= buckets_.count;
      Bucket& bucket = old ? old_[b - buckets_.count] : buckets_[b];
      for (uint32_t lanes = bucket.used; lanes != 0; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        if (old && seed_.order(hash(bucket.id[lane])) < bound_) continue;  // the entry has moved
        visit(bucket.id[lane], Entry(&bucket, lane));
      }
    }
  }

 private:
  static constexpr int64_t kUsualSteps =
      2;  // an insertion takes 0.7 steps in a full map, and 0.12 on average while it fills
  static constexpr int64_t kCrowded = -1;
  static constexpr uint64_t kAtOnce =
      1024;  // a map with fewer buckets grows in one step, in about a millisecond
  // The number of home buckets, with about ten ids, that move for each new id. At this speed the old array is
  // at most 75 % full when the growth ends.
  static constexpr uint64_t kHomesPerId = 3;
  // The memory of these first buckets of the old array is kept until the growth ends, because a run of full
  // buckets at the end of the array continues there. Unless ids are clustered, even in a map of 2^32 ids no
  // run is longer.
  static constexpr uint64_t kWrapped = uint64_t{1} << 16;
  static constexpr uint64_t kAll = ~uint64_t{0};  // a bound above all orders but one

  struct Buckets {
    uint64_t count = 0;
    HugeArray<Bucket> array;

    Buckets() = default;
    explicit Buckets(uint64_t buckets) : count(buckets), array(buckets) {}
    Bucket* data() const { return array.data(); }
    REC_SDK_ALWAYS_INLINE Bucket& operator[](uint64_t b) const { return array[b]; }
    REC_SDK_ALWAYS_INLINE uint64_t home(uint64_t order) const { return IdSeed::place(order, count); }
    REC_SDK_ALWAYS_INLINE uint64_t next(uint64_t b) const { return b + 1 == count ? 0 : b + 1; }
    uint64_t distance(uint64_t from, uint64_t to) const { return to >= from ? to - from : to + count - from; }
  };

  IdMap(int64_t bucket_count, const IdSeed& seed, int64_t expected_buckets)
      : buckets_(static_cast<uint64_t>(bucket_count)),
        seed_(seed),
        expected_buckets_(expected_buckets),
        room_(max_size()) {}

  // Returns the array that contains ids of this order.
  REC_SDK_ALWAYS_INLINE const Buckets& of(uint64_t order) const {
    return __builtin_expect(order >= bound_ && grows(), 0) ? old_ : buckets_;
  }
  REC_SDK_ALWAYS_INLINE Buckets& of(uint64_t order) {
    return __builtin_expect(order >= bound_ && grows(), 0) ? old_ : buckets_;
  }

  static constexpr uint8_t kFull = (1u << kLanes) - 1;
  static constexpr uint8_t bit(int lane) { return static_cast<uint8_t>(1u << lane); }

  // Returns a mask in which bit l is set if lane l contains `id`, even if that lane is free.
  static REC_SDK_ALWAYS_INLINE uint32_t lanes_of(const Bucket& bucket, int64_t id) {
#if defined(__SSE2__)
    const __m128i key = _mm_set1_epi64x(id);
    const __m128i* ids = reinterpret_cast<const __m128i*>(bucket.id);
    // SSE2 compares 32 bits at a time, so both halves of an id must be equal.
    const __m128 low = _mm_castsi128_ps(_mm_cmpeq_epi32(_mm_load_si128(ids), key));
    const __m128 high = _mm_castsi128_ps(_mm_cmpeq_epi32(_mm_load_si128(ids + 1), key));
    const __m128 even = _mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0));
    const __m128 odd = _mm_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1));
    const uint32_t last = bucket.id[kLanes - 1] == id;
    return static_cast<uint32_t>(_mm_movemask_ps(_mm_and_ps(even, odd))) | last << (kLanes - 1);
#else
    uint32_t lanes = 0;
    for (int lane = 0; lane < kLanes; ++lane) lanes |= static_cast<uint32_t>(bucket.id[lane] == id) << lane;
    return lanes;
#endif
  }

  // Adds an entry without a slot. Precondition: the bucket is not full.
  static Entry put(Bucket* bucket, int64_t id, uint32_t row) {
    const int lane = __builtin_ctz(~static_cast<uint32_t>(bucket->used));
    bucket->id[lane] = id;
    bucket->used |= bit(lane);
    const Entry entry(bucket, lane);
    entry.set_row(row);
    return entry;
  }

  // Refills a lane that was freed in a full bucket. A search stops at the first bucket with a free lane, so
  // all buckets from an entry's home up to the entry must be full. A later entry therefore moves back into
  // the hole, which frees another lane, and so on.
  void close_hole(const Buckets& place, uint64_t hole, int hole_lane) const {
    bool full = place[hole].used == kFull;
    free(&place[hole], hole_lane);
    for (uint64_t b = place.next(hole); full; b = place.next(b)) {
      full = place[b].used == kFull;
      const int lane = lane_from_before(place, b, hole);
      if (lane < 0) continue;
      move(place[b], lane, &place[hole], hole_lane);
      free(&place[b], lane);
      hole = b;
      hole_lane = lane;
    }
  }
  static void free(Bucket* bucket, int lane) {
    bucket->used &= ~bit(lane);
    bucket->with_slot &= ~bit(lane);
  }
  static void move(const Bucket& from, int from_lane, Bucket* to, int lane) {
    to->id[lane] = from.id[from_lane];
    to->value[lane] = from.value[from_lane];
    to->used |= bit(lane);
    to->with_slot =
        static_cast<uint8_t>((to->with_slot & ~bit(lane)) | (from.with_slot >> from_lane & 1) << lane);
  }

  // Returns a lane of bucket `b` whose entry may move back to bucket `hole`, because its home is not after
  // `hole`; -1 if there is none.
  int lane_from_before(const Buckets& place, uint64_t b, uint64_t hole) const {
    const Bucket& bucket = place[b];
    for (uint32_t lanes = bucket.used; lanes != 0; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      const uint64_t home = place.home(seed_.order(hash(bucket.id[lane])));
      if (place.distance(home, b) >= place.distance(hole, b)) return lane;
    }
    return -1;
  }

  // The maximum load factor is 0.68, at which 8 % of the ids are outside their home buckets. As the map grows
  // by a quarter beyond the expected ids, it then takes at most 24 bytes per id.
  int64_t max_size() const { return static_cast<int64_t>(buckets_.count) * kLanes * 17 / 25; }
  static int64_t buckets_for(int64_t ids) { return ids * 25 / (17 * kLanes) + 16; }
  int64_t buckets_with(int64_t extra) const {
    if (size_ + extra <= max_size())
      return static_cast<int64_t>(
          buckets_.count);  // the ids are clustered: rehash them with another seed, in as many buckets
    const int64_t by_quarter = static_cast<int64_t>(buckets_.count + buckets_.count / 4);
    const int64_t twice = 2 * static_cast<int64_t>(buckets_.count);
    const int64_t doubled = twice < expected_buckets_ ? twice : expected_buckets_;
    const int64_t larger = by_quarter > doubled ? by_quarter : doubled;
    const int64_t needed = buckets_for(size_ + extra);
    return larger > needed ? larger : needed;
  }

  // If the seed stays the same, home buckets keep their order, so both arrays are traversed from front to
  // back.
  void rehash(int64_t bucket_count) {
    constexpr uint64_t kPiece = 64;
    for (IdSeed seed = seed_.fresh();;) {
      IdMap other(bucket_count, seed, expected_buckets_);
      for (uint64_t b = 0; b < this->bucket_count() && other.room_ != kCrowded; b += kPiece) {
        for_each_from(b, b + kPiece, [&](int64_t id, const Entry& entry) {
          bool added = false;
          const Entry moved = other.find_or_add(id, hash(id), entry.row(), &added);
          if (entry.has_slot()) moved.set_slot(entry.slot());
        });
      }
      seed = other.seed_.fresh();
      if (other.room_ == kCrowded) continue;
      *this = std::move(other);
      return;
    }
  }

  void begin_growth(int64_t bucket_count) {
    const auto count = static_cast<uint64_t>(bucket_count);
    Buckets larger(count);
    old_ = std::exchange(buckets_, std::move(larger));
    room_ = max_size();
    moved_ = returned_ = bound_ = 0;
  }

  // Moves the ids of the next home buckets to the new array. Copies of them stay in the old buckets, because
  // searches for ids behind them pass through these buckets; no search for a moved id reads the copies.
  void move_homes(uint64_t homes) {
    const uint64_t end = moved_ + homes < old_.count ? moved_ + homes : old_.count;
    const uint64_t bound = end == old_.count ? kAll : IdSeed::least(end, old_.count);
    bool full =
        false;  // whether the previous bucket was full, so that ids of these homes may be in the next one
    uint64_t b = moved_;
    for (uint64_t steps = 0; steps < old_.count && (steps < end - moved_ || full);
         ++steps, b = old_.next(b)) {
      const Bucket& bucket = old_[b];
      full = bucket.used == kFull;
      for (uint32_t lanes = bucket.used; lanes != 0; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        const uint64_t order = seed_.order(hash(bucket.id[lane]));
        if (order >= bound_ && (order < bound || end == old_.count)) move_entry(bucket, lane, order);
      }
    }
    moved_ = end;
    bound_ = bound;
    end == old_.count ? end_growth() : release_moved();
  }
  void move_entry(const Bucket& from, int lane, uint64_t order) {
    uint64_t b = buckets_.home(order);
    while (buckets_[b].used == kFull) b = buckets_.next(b);
    const Entry entry = put(&buckets_[b], from.id[lane], from.value[lane]);
    if (from.with_slot >> lane & 1) entry.set_slot(from.value[lane]);
  }
  void release_moved() {
    constexpr uint64_t kPiece = kHugePage / sizeof(Bucket);
    const uint64_t begin = returned_ > kWrapped ? returned_ : kWrapped, end = moved_ / kPiece * kPiece;
    if (end <= begin) return;
    old_.array.release(begin, end - begin);
    returned_ = end;
  }
  void end_growth() {
    old_ = Buckets();
    bound_ = kAll;
  }

  Buckets buckets_;
  Buckets old_;            // the former array while the map grows
  uint64_t bound_ = kAll;  // while the map grows: ids whose order is below it are in buckets_
  uint64_t moved_ = 0;     // while the map grows: the first home of old_ whose ids have not moved
  uint64_t returned_ =
      0;  // the memory of the buckets of old_ before it was released, except the first kWrapped
  IdSeed seed_;
  int64_t expected_buckets_;
  int64_t size_ = 0, erased_ = 0;
  int64_t
      room_;  // the capacity in ids; kCrowded: the ids are clustered and must be rehashed with another seed
};

}  // namespace rec_sdk
