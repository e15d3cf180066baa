// Software prefetch of rows. Lookups read random addresses, which no hardware prefetcher can predict.
#pragma once

#include <cstdint>

#include "op_kernels/common/isa.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

constexpr int64_t kCacheLine = 64;

// Returns how many rows ahead to prefetch: enough to hide the latency, few enough to stay within the L2
// cache.
REC_SDK_INLINE int64_t rows_ahead(int64_t row_bytes) {
  const int64_t ahead = 128 * kCacheLine / row_bytes;
  return ahead < 4 ? 4 : ahead > 64 ? 64 : ahead;
}

// Returns the bytes to prefetch of each of the rows of `bytes` bytes, `stride` bytes apart. It is more than
// `bytes` if rows may start inside a cache line, because they may then end in one more line. Not inlined:
// when GCC 12 inlines it, the loop of the row-wise update becomes a quarter slower.
inline __attribute__((noinline)) int64_t prefetch_bytes(const void* first, int64_t stride, int64_t bytes) {
  const uint64_t starts = reinterpret_cast<uintptr_t>(first) | static_cast<uint64_t>(stride | kCacheLine);
  return bytes + kCacheLine - static_cast<int64_t>(starts & -starts);
}

// Prefetches a row into L2. L1 has too few miss buffers, and rows would evict each other there before use.
REC_SDK_INLINE void prefetch_row(const void* row, int64_t bytes) {
  const char* line = static_cast<const char*>(row);
  for (int64_t at = 0; at < bytes; at += kCacheLine) {
    __builtin_prefetch(line + at, 0, 2);
  }
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
