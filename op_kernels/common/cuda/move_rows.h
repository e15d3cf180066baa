// gather_rows and scatter_rows, which differ in their direction only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "op_kernels/common/arguments.h"
#include "op_kernels/common/cuda/launch.h"
#include "op_kernels/common/cuda/panels.h"
#include "op_kernels/common/cuda/vector.h"

namespace rec_sdk {
namespace cuda {

constexpr int kMovedRows = 4;  // of a team at once: their loads overlap

// Enough for the bytes in flight on a host link, and the other multiprocessors stay free for the kernels of
// other streams: such a copy is slow, and its threads do nothing but wait.
constexpr int64_t kHostBlocks = 32;
constexpr int64_t kDeviceBlocks = int64_t{1} << 20;

// kRows rows from row `first` on, without a branch between their loads.
template <int kBytes, bool kGather, int kRows>
__device__ __forceinline__ void move_group(const CopyRows& a, int64_t first, int64_t column) {
  using Part = Word<kBytes>;
  uint8_t* const rows = a.rows + first * a.bytes + column;
  Part* cached[kRows];
  Part moved[kRows];
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    const int32_t slot = __ldg(a.slots + first + u);
    cached[u] = reinterpret_cast<Part*>(a.cache + slot * a.bytes + column);
  }
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    moved[u] = kGather ? __ldg(cached[u]) : __ldcs(reinterpret_cast<const Part*>(rows + u * a.bytes));
  }
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (kGather) {
      __stcs(reinterpret_cast<Part*>(rows + u * a.bytes), moved[u]);
    } else {
      *cached[u] = moved[u];
    }
  }
}

template <int kBytes, bool kGather>
__global__ void __launch_bounds__(kBlockThreads)
    move_rows(const __grid_constant__ CopyRows a, const __grid_constant__ Panels panels) {
  const Team team(panels.width);
  const int64_t items = (a.count + kMovedRows - 1) / kMovedRows * panels.count;
  const int64_t teams = static_cast<int64_t>(gridDim.x) * (kBlockThreads / panels.width);
#pragma unroll 1
  for (int64_t item = team.index; item < items; item += teams) {
    const PanelPlace place(panels, item, team.lane, kBytes);
    if (place.column >= a.bytes) continue;
    const int64_t first = place.row * kMovedRows, last = first + kMovedRows;
    if (last <= a.count) {
      move_group<kBytes, kGather, kMovedRows>(a, first, place.column);
      continue;
    }
#pragma unroll 1
    for (int64_t i = first; i < a.count; ++i) move_group<kBytes, kGather, 1>(a, i, place.column);
  }
}

template <int kBytes, bool kGather>
cudaError_t move_words(const CopyRows& a, int64_t most_blocks, cudaStream_t stream) {
  const Panels panels = panels_of(a.bytes, kBytes);
  const int64_t items = (a.count + kMovedRows - 1) / kMovedRows * panels.count;
  const int64_t blocks = blocks_of(items, panels.width);
  return launch(move_rows<kBytes, kGather>, blocks < most_blocks ? blocks : most_blocks, stream, a, panels);
}

// Records are multiples of 16 bytes; what else a caller has is copied in smaller words.
template <bool kGather>
cudaError_t move_rows(const CopyRows& a, cudaStream_t stream) {
  if (a.count == 0) return cudaSuccess;
  cudaPointerAttributes rows{};
  const cudaError_t error = cudaPointerGetAttributes(&rows, a.rows);
  if (error != cudaSuccess) return error;
  const int64_t most_blocks = rows.type == cudaMemoryTypeHost ? kHostBlocks : kDeviceBlocks;
  const auto in_words_of = [&](int bytes) {
    return a.bytes % bytes == 0 && is_multiple(a.cache, bytes) && is_multiple(a.rows, bytes);
  };
  if (in_words_of(16)) return move_words<16, kGather>(a, most_blocks, stream);
  if (in_words_of(4)) return move_words<4, kGather>(a, most_blocks, stream);
  return move_words<1, kGather>(a, most_blocks, stream);
}

}  // namespace cuda
}  // namespace rec_sdk
