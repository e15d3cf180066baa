// Copies of whole rows between the cache and packed arrays.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "op_kernels/common/arguments.h"
#include "op_kernels/common/cuda/launch.h"
#include "op_kernels/common/cuda/panels.h"
#include "op_kernels/common/cuda/vector.h"

namespace rec_sdk {
namespace cuda {

constexpr int kMovedRows = 4;  // rows that a team copies at once, so that their loads overlap

// Maximum number of blocks of a copy over the host link. It is enough to keep the link busy, and leaves the
// other multiprocessors to the kernels of other streams, because the threads of such a copy mostly wait.
constexpr int64_t kHostBlocks = 32;
constexpr int64_t kDeviceBlocks = int64_t{1} << 20;

// Moves is a class that describes a copy. It has
//   count, bytes                               the number of rows, and the bytes of each row
//   move<kBytes, kRows>(first, column)         on the device, copies a word of kBytes bytes of each of kRows
//                                              rows from `first` on, without a branch between the loads
//   in_words_of(bytes)                         whether row size and addresses are multiples of `bytes`
//   over_host_link(&host)                      sets `host` to whether the copy accesses host memory
template <int kBytes, class Moves>
__global__ void __launch_bounds__(kBlockThreads)
    move_rows(const __grid_constant__ Moves moves, const __grid_constant__ Panels panels) {
  const Team team(panels.width);
  const int64_t items = (moves.count + kMovedRows - 1) / kMovedRows * panels.count;
  const int64_t teams = static_cast<int64_t>(gridDim.x) * (kBlockThreads / panels.width);
#pragma unroll 1
  for (int64_t item = team.index; item < items; item += teams) {
    const PanelPlace place(panels, item, team.lane, kBytes);
    if (place.column >= moves.bytes) continue;
    const int64_t first = place.row * kMovedRows, last = first + kMovedRows;
    if (last <= moves.count) {
      moves.template move<kBytes, kMovedRows>(first, place.column);
      continue;
    }
#pragma unroll 1
    for (int64_t i = first; i < moves.count; ++i) moves.template move<kBytes, 1>(i, place.column);
  }
}

template <int kBytes, class Moves>
cudaError_t move_words(const Moves& moves, int64_t most_blocks, cudaStream_t stream) {
  const Panels panels = panels_of(moves.bytes, kBytes);
  const int64_t items = (moves.count + kMovedRows - 1) / kMovedRows * panels.count;
  const int64_t blocks = blocks_of(items, panels.width);
  return launch(move_rows<kBytes, Moves>, blocks < most_blocks ? blocks : most_blocks, stream, moves, panels);
}

inline cudaError_t is_host_memory(const void* address, bool* host) {
  cudaPointerAttributes found{};
  const cudaError_t error = cudaPointerGetAttributes(&found, address);
  *host = error == cudaSuccess && found.type == cudaMemoryTypeHost;
  return error;
}

// Launches a copy in words of 16 bytes, which fits all records. Rows of other sizes or alignments are copied
// in smaller words.
template <class Moves>
cudaError_t launch_moves(const Moves& moves, cudaStream_t stream) {
  if (moves.count == 0) return cudaSuccess;
  bool host = false;
  const cudaError_t error = moves.over_host_link(&host);
  if (error != cudaSuccess) return error;
  const int64_t most_blocks = host ? kHostBlocks : kDeviceBlocks;
  if (moves.in_words_of(16)) return move_words<16>(moves, most_blocks, stream);
  if (moves.in_words_of(4)) return move_words<4>(moves, most_blocks, stream);
  return move_words<1>(moves, most_blocks, stream);
}

// The copies of gather_rows and scatter_rows, which differ only in their direction.
template <bool kGather>
struct GatherOrScatter : CopyRows {
  explicit GatherOrScatter(const CopyRows& a) : CopyRows(a) {}

  bool in_words_of(int size) const {
    return bytes % size == 0 && is_multiple(cache, size) && is_multiple(rows, size);
  }
  cudaError_t over_host_link(bool* host) const { return is_host_memory(rows, host); }

  template <int kBytes, int kRows>
  __device__ __forceinline__ void move(int64_t first, int64_t column) const {
    using Part = Word<kBytes>;
    uint8_t* const packed = rows + first * bytes + column;
    Part* cached[kRows];
    Part moved[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int32_t slot = __ldg(slots + first + u);
      cached[u] = reinterpret_cast<Part*>(cache + slot * bytes + column);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      moved[u] = kGather ? __ldg(cached[u]) : __ldcs(reinterpret_cast<const Part*>(packed + u * bytes));
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (kGather) {
        __stcs(reinterpret_cast<Part*>(packed + u * bytes), moved[u]);
      } else {
        *cached[u] = moved[u];
      }
    }
  }
};

}  // namespace cuda
}  // namespace rec_sdk
