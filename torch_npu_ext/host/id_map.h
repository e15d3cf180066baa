// id -> (row, slot). Open addressing over cache-line buckets of four entries, so a lookup is one memory
// access almost always. Any int64 is a legal id: an entry is told free by its tag.
#pragma once

#include <cstdint>
#include <utility>

#include "torch_npu_ext/host/memory.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define REC_SDK_ALWAYS_INLINE inline __attribute__((always_inline))

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
  struct Entry {
    uint32_t row;
    uint32_t* slot;  // null: the id is not there. Valid until the next growth or erase
    explicit operator bool() const { return slot != nullptr; }
  };

  explicit IdMap(int64_t expected = 0) : bucket_count_(buckets_for(expected)), buckets_(bucket_count_) {}

  // Two folded multiplications: the high bits, which choose the bucket, depend on every bit of the id.
  static REC_SDK_ALWAYS_INLINE uint64_t hash(int64_t id) {
    return fold(fold(static_cast<uint64_t>(id) ^ 0x9E3779B97F4A7C15ull, 0xD6E8FEB86659FD93ull),
                0x9E3779B97F4A7C15ull);
  }

  static constexpr int kLanes = 4;
  struct alignas(64) Bucket {
    int64_t id[kLanes];
    uint32_t tag[kLanes];  // row + 1; 0 = free, so zeroed memory is an empty map
    uint32_t slot[kLanes];
  };
  // Where the search for a hash begins; void once the map has grown.
  struct Homes {
    const Bucket* buckets;
    uint64_t count;
    REC_SDK_ALWAYS_INLINE const Bucket* of(uint64_t hash) const { return buckets + fastrange(hash, count); }
  };
  Homes homes() const { return {buckets_.data(), bucket_count_}; }
  // For a find(): the home, and where it goes on when the home is full.
  REC_SDK_ALWAYS_INLINE void prefetch(uint64_t hash) const {
    const Bucket* const home = homes().of(hash);
    rec_sdk::prefetch(home);
    rec_sdk::prefetch(home + 1);
  }

  REC_SDK_ALWAYS_INLINE Entry find(int64_t id, uint64_t hash) const {
    for (uint64_t b = home(hash);; b = next(b)) {
      Bucket& bucket = buckets_[b];
      const int lane = find_lane(bucket, id);
      if (lane >= 0) return {bucket.tag[lane] - 1, &bucket.slot[lane]};
      if (free_lane(bucket) >= 0) return {0, nullptr};
    }
  }

  // The slot of `id` if `bucket` has it, or else kNoSlot.
  static REC_SDK_ALWAYS_INLINE uint32_t slot_at(const Bucket& bucket, int64_t id) {
    const uint32_t lanes = lanes_of(bucket, id);
    const uint32_t none = 0u - ((lanes - 1) >> 31);  // kNoSlot for no lane; GCC makes a condition a branch
    return bucket.slot[__builtin_ctz(lanes | 1u << (kLanes - 1))] | none;
  }

  // The entry of `id`; when it is new, it is added with `new_row` and no slot. Precondition: growth(1) == 0.
  Entry find_or_add(int64_t id, uint64_t hash, uint32_t new_row, bool* added) {
    for (uint64_t b = home(hash);; b = next(b)) {
      Bucket& bucket = buckets_[b];
      const int lane = find_lane(bucket, id);
      *added = lane < 0;
      if (lane >= 0) return {bucket.tag[lane] - 1, &bucket.slot[lane]};
      const int free = free_lane(bucket);
      if (free >= 0) return fill(bucket, free, id, new_row, kNoSlot);
    }
  }

  bool erase(int64_t id, uint64_t hash) {
    for (uint64_t b = home(hash);; b = next(b)) {
      const int lane = find_lane(buckets_[b], id);
      if (lane >= 0) {
        close_hole(b, lane);
        --size_;
        return true;
      }
      if (free_lane(buckets_[b]) >= 0) return false;
    }
  }

  // Bytes of the bigger bucket array that `extra` more ids would need; 0 when there is room.
  int64_t growth(int64_t extra) const {
    return size_ + extra <= max_size() ? 0 : grown_buckets(extra) * static_cast<int64_t>(sizeof(Bucket));
  }

  void reserve(int64_t extra) {
    if (size_ + extra > max_size()) rehash(grown_buckets(extra));
  }

  void clear() {
    bucket_count_ = buckets_for(0);
    buckets_ = HugeArray<Bucket>(bucket_count_);
    size_ = 0;
  }

  int64_t size() const { return size_; }
  int64_t bytes() const { return static_cast<int64_t>(bucket_count_ * sizeof(Bucket)); }

  template <class Visit>  // visit(id, row, slot)
  void for_each(Visit visit) const {
    for (uint64_t b = 0; b < bucket_count_; ++b) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const Bucket& bucket = buckets_[b];
        if (bucket.tag[lane] != 0) visit(bucket.id[lane], bucket.tag[lane] - 1, bucket.slot[lane]);
      }
    }
  }

 private:
  static REC_SDK_ALWAYS_INLINE uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }

  // Lemire's fastrange: any bucket count will do, so growth need not double.
  static REC_SDK_ALWAYS_INLINE uint64_t fastrange(uint64_t hash, uint64_t count) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * count) >> 64);
  }
  REC_SDK_ALWAYS_INLINE uint64_t home(uint64_t hash) const { return fastrange(hash, bucket_count_); }
  REC_SDK_ALWAYS_INLINE uint64_t next(uint64_t b) const { return b + 1 == bucket_count_ ? 0 : b + 1; }

  // Bit l: lane l has `id`. At most one has.
  static REC_SDK_ALWAYS_INLINE uint32_t lanes_of(const Bucket& bucket, int64_t id) {
#if defined(__SSE2__)
    const __m128i key = _mm_set1_epi64x(id);
    const __m128i* ids = reinterpret_cast<const __m128i*>(bucket.id);
    // SSE2 compares 32-bit halves: both of an id must be equal.
    const __m128 low = _mm_castsi128_ps(_mm_cmpeq_epi32(_mm_load_si128(ids), key));
    const __m128 high = _mm_castsi128_ps(_mm_cmpeq_epi32(_mm_load_si128(ids + 1), key));
    const __m128 even = _mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0));
    const __m128 odd = _mm_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1));
    const __m128i tags = _mm_load_si128(reinterpret_cast<const __m128i*>(bucket.tag));
    const __m128 free = _mm_castsi128_ps(_mm_cmpeq_epi32(tags, _mm_setzero_si128()));
    return static_cast<uint32_t>(_mm_movemask_ps(_mm_andnot_ps(free, _mm_and_ps(even, odd))));
#else
    uint32_t lanes = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes |= static_cast<uint32_t>((bucket.id[lane] == id) & (bucket.tag[lane] != 0)) << lane;
    }
    return lanes;
#endif
  }

  static REC_SDK_ALWAYS_INLINE int find_lane(const Bucket& bucket, int64_t id) {
    const uint32_t lanes = lanes_of(bucket, id);
    return lanes == 0 ? -1 : __builtin_ctz(lanes);
  }

  static REC_SDK_ALWAYS_INLINE int free_lane(const Bucket& bucket) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (bucket.tag[lane] == 0) return lane;
    }
    return -1;
  }

  Entry fill(Bucket& bucket, int lane, int64_t id, uint32_t row, uint32_t slot) {
    bucket.id[lane] = id;
    bucket.tag[lane] = row + 1;
    bucket.slot[lane] = slot;
    ++size_;
    return {row, &bucket.slot[lane]};
  }

  // A search stops at the first bucket with a free lane, so every bucket between an entry's home and its
  // place must be full. Freeing a lane of a full bucket therefore pulls a later entry back into it, and so
  // on.
  void close_hole(uint64_t hole, int hole_lane) {
    bool full = free_lane(buckets_[hole]) < 0;
    buckets_[hole].tag[hole_lane] = 0;
    for (uint64_t b = next(hole); full; b = next(b)) {
      full = free_lane(buckets_[b]) < 0;
      const int lane = lane_from_before(b, hole);
      if (lane < 0) continue;
      buckets_[hole].id[hole_lane] = buckets_[b].id[lane];
      buckets_[hole].tag[hole_lane] = buckets_[b].tag[lane];
      buckets_[hole].slot[hole_lane] = buckets_[b].slot[lane];
      buckets_[b].tag[lane] = 0;
      hole = b;
      hole_lane = lane;
    }
  }

  // A lane of bucket `b` whose entry would be found at `hole` as well: its home is not after the hole.
  int lane_from_before(uint64_t b, uint64_t hole) const {
    const Bucket& bucket = buckets_[b];
    for (int lane = 0; lane < kLanes; ++lane) {
      if (bucket.tag[lane] == 0) continue;
      if (distance(home(hash(bucket.id[lane])), b) >= distance(hole, b)) return lane;
    }
    return -1;
  }
  uint64_t distance(uint64_t from, uint64_t to) const {
    return to >= from ? to - from : to + bucket_count_ - from;
  }

  // Load 0.85: beyond it the runs of full buckets grow quickly.
  int64_t max_size() const { return static_cast<int64_t>(bucket_count_) * kLanes * 17 / 20; }
  static int64_t buckets_for(int64_t ids) { return ids * 20 / (17 * kLanes) + 16; }
  int64_t grown_buckets(int64_t extra) const {
    const int64_t larger = bucket_count_ + bucket_count_ / 4;  // at most 24 bytes per id, at load 0.85 * 0.8
    const int64_t needed = buckets_for(size_ + extra);
    return larger > needed ? larger : needed;
  }

  void rehash(int64_t bucket_count) {
    IdMap bigger;
    bigger.buckets_ = HugeArray<Bucket>(bucket_count);
    bigger.bucket_count_ = bucket_count;
    // Homes keep their order under fastrange, so both arrays are walked from front to back.
    for_each([&](int64_t id, uint32_t row, uint32_t slot) {
      bool added = false;
      *bigger.find_or_add(id, hash(id), row, &added).slot = slot;
    });
    *this = std::move(bigger);
  }

  uint64_t bucket_count_;
  HugeArray<Bucket> buckets_;
  int64_t size_ = 0;
};

}  // namespace rec_sdk
