#include "op_kernels/common/cuda/kernels.h"
#include "op_kernels/common/cuda/move_rows.h"

namespace rec_sdk {
namespace cuda {
namespace {

// Swaps rows of the cache. A word of a slot is read and written by the same thread, so no synchronization is
// needed.
struct RowExchange : SwapRows {
  explicit RowExchange(const SwapRows& a) : SwapRows(a) {}

  bool in_words_of(int size) const {
    return bytes % size == 0 && is_multiple(cache, size) && is_multiple(rows, size) &&
           is_multiple(victims, size);
  }
  cudaError_t over_host_link(bool* host) const {
    const cudaError_t error = is_host_memory(rows, host);
    return error != cudaSuccess || *host || victim_count == 0 ? error : is_host_memory(victims, host);
  }

  template <int kBytes, int kRows>
  __device__ __forceinline__ void move(int64_t first, int64_t column) const {
    using Part = Word<kBytes>;
    const uint8_t* const incoming = rows + first * bytes + column;
    Part* cached[kRows];
    int32_t place[kRows];
    Part left[kRows], came[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      cached[u] = reinterpret_cast<Part*>(cache + __ldg(slots + first + u) * bytes + column);
      place[u] = __ldg(victim_indices + first + u);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      left[u] = *cached[u];  // also read if the slot is free: cheaper than a branch before the other loads
      came[u] = __ldcs(reinterpret_cast<const Part*>(incoming + u * bytes));
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (place[u] >= 0) __stcs(reinterpret_cast<Part*>(victims + place[u] * bytes + column), left[u]);
      *cached[u] = came[u];
    }
  }
};

}  // namespace

cudaError_t swap_rows(const SwapRows& a, cudaStream_t stream) { return launch_moves(RowExchange(a), stream); }

}  // namespace cuda
}  // namespace rec_sdk
