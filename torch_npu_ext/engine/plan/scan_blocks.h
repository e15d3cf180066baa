// The blocks of lookups that pass through the pipeline of Scan::scan_piece().
//
// The pipeline has six stages. 1: the id of a lookup is hashed and its entry prefetched. 2: the entry is
// peeked at, and the stamp of its slot prefetched. 3: if the peek did not find the key, the address that a
// full search reads next is prefetched. 4: such a lookup is settled by a full search. 5: its row is numbered.
// 6: it is counted. The stages take turns on blocks of eight lookups. The loop over a block is unrolled, and
// the values that a stage needs are loaded once for the block. The distances between the stages space the
// processor's cache misses, so that they overlap; in large blocks they would queue. Lines are prefetched into
// L2, and into L1 shortly before their use, because processors appear to drop some prefetches into L2.
// Without the second prefetch, plans took up to three times as long.
#pragma once

#include <algorithm>
#include <cstdint>

#include "torch_npu_ext/engine/plan/scan.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace rec_sdk {

constexpr int64_t kBlock = 8;  // lookups
// The distance of each stage behind the first, in blocks.
constexpr int64_t kPeek = 10, kBeyond = 11, kSettle = 13, kNumber = 15, kTally = 17;
constexpr int64_t kRing = 128;     // lookups; more than kBeyond blocks, and a power of two
constexpr int64_t kReserved = 64;  // number of lookups for which a map is made large enough at once
constexpr uint64_t ring(int64_t j) { return static_cast<uint64_t>(j) % kRing; }

// Calls stage(first, k) for the lookups first + k of a block. Unless `inside`, the block may be the last one,
// or lie before or behind all blocks.
template <bool inside, class Stage>
REC_SDK_ALWAYS_INLINE void for_block(int64_t block, int64_t count, const Stage& stage) {
  const int64_t first = block * kBlock;
  if constexpr (inside) {
#pragma GCC unroll 8
    for (int64_t k = 0; k < kBlock; ++k) stage(first, k);
  } else {
    const int64_t end = block < 0 ? 0 : std::min(kBlock, count - first);
#pragma GCC unroll 1
    for (int64_t k = 0; k < end; ++k) stage(first, k);
  }
}

// Returns the lookups of a block whose keys are kNoSlot: bit k for the k-th lookup of the block.
template <bool inside>
REC_SDK_ALWAYS_INLINE uint32_t missing_of(const RowKey* keys, int64_t block, int64_t count) {
#if defined(__SSE2__)
  if constexpr (inside) {
    const __m128i* const four = reinterpret_cast<const __m128i*>(keys + block * kBlock);
    const __m128i none = _mm_set1_epi32(-1);
    const __m128i low = _mm_cmpeq_epi32(_mm_loadu_si128(four), none);
    const __m128i high = _mm_cmpeq_epi32(_mm_loadu_si128(four + 1), none);
    const __m128i words = _mm_packs_epi32(low, high);
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(words, _mm_setzero_si128())));
  }
#endif
  uint32_t missing = 0;
  for_block<inside>(block, count, [&](int64_t first, int64_t k) {
    missing |= static_cast<uint32_t>(keys[first + k] == kNoSlot) << k;
  });
  return missing;
}

// Returns the first of these lookups of a block, or any lookup if there is none.
REC_SDK_ALWAYS_INLINE int64_t first_of(uint32_t lookups) {
  return __builtin_ctz(lookups | 1u << (kBlock - 1));
}

template <class Visit>  // calls visit(bit) for each set bit, in ascending order
REC_SDK_ALWAYS_INLINE void for_each_bit(uint32_t bits, const Visit& visit) {
  for (; __builtin_expect(bits != 0, 0); bits &= bits - 1) visit(__builtin_ctz(bits));
}

// Returns `a` if `first`, else `b`, without a branch. GCC compiles a conditional expression to a branch here,
// which would often be mispredicted.
REC_SDK_ALWAYS_INLINE const void* choose(bool first, const void* a, const void* b) {
  const uintptr_t x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return reinterpret_cast<const void*>(y ^ ((x ^ y) & (uintptr_t{0} - first)));
}

}  // namespace rec_sdk
