// id -> its slot or, without one, its row. Open addressing over cache-line buckets of five entries, so a
// lookup is one memory access almost always. Any int64 is a legal id: an entry is told free by a bit.
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

// Into L2: fetching for L1, as every fetch for writing does on x86, waits for its few miss buffers. GCC
// deletes calls of a function that does nothing but prefetch unless it must be inlined.
REC_SDK_ALWAYS_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }
// Into L1, shortly before the use: processors seem to drop fetches into L2 at times.
REC_SDK_ALWAYS_INLINE void prefetch_near(const void* address) { __builtin_prefetch(address, 0, 3); }

class IdMap {
 public:
  static constexpr int kLanes = 5;
  struct alignas(64) Bucket {
    int64_t id[kLanes];
    uint32_t value[kLanes];  // the slot, or else the row
    uint8_t with_slot;       // bit l: lane l is used, and has a slot
    uint8_t used;            // bit l: lane l is not free. Zeroed memory is an empty map
  };

  // The entry of an id that is there, or null. Valid until the next growth or erase.
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
    void set_row(uint32_t row) const {  // and no slot
      bucket_->value[lane_] = row;
      bucket_->with_slot &= ~bit(lane_);
    }

   private:
    Bucket* bucket_;
    int lane_;
  };

  explicit IdMap(int64_t expected = 0) : IdMap(buckets_for(expected), IdSeed(kUsualSteps)) {}

  static REC_SDK_ALWAYS_INLINE uint64_t hash(int64_t id) { return IdSeed::hash(id); }

  // Where the search for a hash begins; void once the map has grown.
  struct Homes {
    const Bucket* buckets;
    uint64_t count, seed;
    REC_SDK_ALWAYS_INLINE const Bucket* of(uint64_t hash) const {
      return buckets + IdSeed::home(hash, seed, count);
    }
  };
  Homes homes() const { return {buckets_.data(), bucket_count_, seed_.value()}; }
  // For a find(): the home, and where it goes on when the home is full.
  REC_SDK_ALWAYS_INLINE void prefetch(uint64_t hash) const {
    const Bucket* const home = homes().of(hash);
    rec_sdk::prefetch(home);
    rec_sdk::prefetch(home + 1);
  }

  REC_SDK_ALWAYS_INLINE Entry find(int64_t id, uint64_t hash) const {
    for (uint64_t b = home(hash);; b = next(b)) {
      Bucket& bucket = buckets_[b];
      const uint32_t lanes = lanes_of(bucket, id) & bucket.used;
      if (lanes != 0) return {&bucket, __builtin_ctz(lanes)};
      if (bucket.used != kFull) return {};
    }
  }

  // The slot of `id` if it has one and `bucket` has the id, or else kNoSlot.
  static REC_SDK_ALWAYS_INLINE uint32_t slot_at(const Bucket& bucket, int64_t id) {
    const uint32_t lanes = lanes_of(bucket, id) & bucket.with_slot;
    const uint32_t none = 0u - ((lanes - 1) >> 31);  // kNoSlot for no lane; GCC makes a condition a branch
    return bucket.value[__builtin_ctz(lanes | 1u << (kLanes - 1))] | none;
  }

  // The entry of `id`; when it is new, it is added with `new_row` and no slot. Precondition: growth(1) == 0.
  Entry find_or_add(int64_t id, uint64_t hash, uint32_t new_row, bool* added) {
    const uint64_t first = home(hash);
    for (uint64_t b = first;; b = next(b)) {
      Bucket& bucket = buckets_[b];
      const uint32_t lanes = lanes_of(bucket, id) & bucket.used;
      *added = lanes == 0;
      if (lanes != 0) return {&bucket, __builtin_ctz(lanes)};
      if (bucket.used == kFull) continue;
      const int lane = free_lane(bucket);
      bucket.id[lane] = id;
      bucket.used |= bit(lane);
      ++size_;
      if (b != first && seed_.crowds(id, distance(first, b), size_ + erased_)) room_ = kCrowded;
      const Entry entry(&bucket, lane);
      entry.set_row(new_row);
      return entry;
    }
  }

  bool erase(int64_t id, uint64_t hash) {
    for (uint64_t b = home(hash);; b = next(b)) {
      const uint32_t lanes = lanes_of(buckets_[b], id) & buckets_[b].used;
      if (lanes != 0) {
        close_hole(b, __builtin_ctz(lanes));
        --size_;
        ++erased_;
        return true;
      }
      if (buckets_[b].used != kFull) return false;
    }
  }

  // Bytes of the bucket array that `extra` more ids need in place of this one; 0 when there is room.
  int64_t growth(int64_t extra) const {
    return size_ + extra <= room_ ? 0 : buckets_with(extra) * static_cast<int64_t>(sizeof(Bucket));
  }

  void reserve(int64_t extra) {
    if (size_ + extra > room_) rehash(buckets_with(extra));
  }
  // A map that was made with room for many ids takes huge pages when these and `extra` more are on most of
  // the small ones.
  void choose_pages(int64_t extra) noexcept {
    if (pages_ == Pages::kHuge || pages_for(size_ + extra, bucket_count_) == Pages::kSmall) return;
    buckets_.use_huge_pages();
    pages_ = Pages::kHuge;
  }

  // Gives memory back when the map could do with a fourth of it, but keeps room for `expected` ids.
  void shrink(int64_t expected) noexcept {
    const int64_t wanted = buckets_for(size_ + size_ / 4 > expected ? size_ + size_ / 4 : expected);
    if (static_cast<int64_t>(bucket_count_) / 4 < wanted) return;
    try {
      rehash(wanted);
    } catch (const std::bad_alloc&) {  // then it stays as it is
    }
  }

  void clear() { *this = IdMap(); }

  int64_t size() const { return size_; }
  int64_t bytes() const { return static_cast<int64_t>(bucket_count_ * sizeof(Bucket)); }

  template <class Visit>  // visit(id, entry)
  void for_each(Visit visit) const {
    for_each_from(0, bucket_count_, visit);
  }

  // The entries of buckets [begin, end); nothing beyond the last. The map must not change between its pieces.
  uint64_t bucket_count() const { return bucket_count_; }
  template <class Visit>
  void for_each_from(uint64_t begin, uint64_t end, Visit visit) const {
    for (uint64_t b = begin; b < end && b < bucket_count_; ++b) {
      Bucket& bucket = buckets_[b];
      for (uint32_t lanes = bucket.used; lanes != 0; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        visit(bucket.id[lane], Entry(&bucket, lane));
      }
    }
  }

 private:
  static constexpr int64_t kUsualSteps = 2;  // 0.7 in a full map, 0.12 on the average
  static constexpr int64_t kCrowded = -1;

  IdMap(int64_t bucket_count, const IdSeed& seed, int64_t ids = 0)
      : bucket_count_(static_cast<uint64_t>(bucket_count)),
        pages_(pages_for(ids, bucket_count_)),
        buckets_(bucket_count_, pages_),
        seed_(seed),
        room_(max_size()) {}

  REC_SDK_ALWAYS_INLINE uint64_t home(uint64_t hash) const {
    return IdSeed::home(hash, seed_.value(), bucket_count_);
  }
  REC_SDK_ALWAYS_INLINE uint64_t next(uint64_t b) const { return b + 1 == bucket_count_ ? 0 : b + 1; }

  static constexpr uint8_t kFull = (1u << kLanes) - 1;
  static constexpr uint8_t bit(int lane) { return static_cast<uint8_t>(1u << lane); }

  // Bit l: lane l has `id`, or had it and is free.
  static REC_SDK_ALWAYS_INLINE uint32_t lanes_of(const Bucket& bucket, int64_t id) {
#if defined(__SSE2__)
    const __m128i key = _mm_set1_epi64x(id);
    const __m128i* ids = reinterpret_cast<const __m128i*>(bucket.id);
    // SSE2 compares 32-bit halves: both of an id must be equal.
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

  static int free_lane(const Bucket& bucket) {  // precondition: not full
    return __builtin_ctz(~static_cast<uint32_t>(bucket.used));
  }

  // A search stops at the first bucket with a free lane, so every bucket between an entry's home and its
  // place must be full. Freeing a lane of a full bucket therefore pulls a later entry back into it, and so
  // on.
  void close_hole(uint64_t hole, int hole_lane) {
    bool full = buckets_[hole].used == kFull;
    free(hole, hole_lane);
    for (uint64_t b = next(hole); full; b = next(b)) {
      full = buckets_[b].used == kFull;
      const int lane = lane_from_before(b, hole);
      if (lane < 0) continue;
      move(buckets_[b], lane, &buckets_[hole], hole_lane);
      free(b, lane);
      hole = b;
      hole_lane = lane;
    }
  }
  void free(uint64_t b, int lane) {
    buckets_[b].used &= ~bit(lane);
    buckets_[b].with_slot &= ~bit(lane);
  }
  static void move(const Bucket& from, int from_lane, Bucket* to, int lane) {
    to->id[lane] = from.id[from_lane];
    to->value[lane] = from.value[from_lane];
    to->used |= bit(lane);
    to->with_slot =
        static_cast<uint8_t>((to->with_slot & ~bit(lane)) | (from.with_slot >> from_lane & 1) << lane);
  }

  // A lane of bucket `b` whose entry would be found at `hole` as well: its home is not after the hole.
  int lane_from_before(uint64_t b, uint64_t hole) const {
    const Bucket& bucket = buckets_[b];
    for (uint32_t lanes = bucket.used; lanes != 0; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      if (distance(home(hash(bucket.id[lane])), b) >= distance(hole, b)) return lane;
    }
    return -1;
  }
  uint64_t distance(uint64_t from, uint64_t to) const {
    return to >= from ? to - from : to + bucket_count_ - from;
  }

  // Load 0.68: 8 in 100 ids are not in their home then. With growth by a quarter, at most 24 bytes per id.
  int64_t max_size() const { return static_cast<int64_t>(bucket_count_) * kLanes * 17 / 25; }
  static int64_t buckets_for(int64_t ids) { return ids * 25 / (17 * kLanes) + 16; }
  int64_t buckets_with(int64_t extra) const {
    if (size_ + extra <= max_size()) return static_cast<int64_t>(bucket_count_);  // crowded
    const int64_t larger = bucket_count_ + bucket_count_ / 4;
    const int64_t needed = buckets_for(size_ + extra);
    return larger > needed ? larger : needed;
  }

  // With one seed homes keep their order, so both arrays are walked from front to back.
  void rehash(int64_t bucket_count) {
    constexpr uint64_t kPiece = 64;
    for (IdSeed seed = seed_.fresh();;) {
      IdMap other(bucket_count, seed, size_);
      for (uint64_t b = 0; b < bucket_count_ && other.room_ != kCrowded; b += kPiece) {
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

  static Pages pages_for(int64_t ids, uint64_t buckets) {
    const uint64_t small_pages = buckets * sizeof(Bucket) / small_page();
    return static_cast<uint64_t>(ids) < small_pages ? Pages::kSmall : Pages::kHuge;
  }

  uint64_t bucket_count_;
  Pages pages_;
  HugeArray<Bucket> buckets_;
  IdSeed seed_;
  int64_t size_ = 0, erased_ = 0;
  int64_t room_;  // for so many ids; kCrowded: they need other places
};

}  // namespace rec_sdk
