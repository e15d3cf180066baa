#include <cuda_runtime.h>

#include <cstdint>

#include "op_kernels/common/convert.h"
#include "op_kernels/common/cuda/kernels.h"
#include "op_kernels/common/cuda/launch.h"
#include "op_kernels/common/cuda/panels.h"
#include "op_kernels/common/cuda/vector.h"

namespace rec_sdk {
namespace cuda {
namespace {

using REC_SDK_ISA::Float32;
using REC_SDK_ISA::with_format;

constexpr int kGroup = 4;  // rows that a team copies at once, so that their loads overlap

// Copies kRows rows from lookup `first` on, without a branch between their loads.
template <class Format, int N, int kRows>
__device__ __forceinline__ void copy_group(const LookupSequence& a, int64_t first, int64_t column) {
  int32_t slots[kRows];
  Packed<Format, N> rows[kRows];
#pragma unroll
  for (int u = 0; u < kRows; ++u) slots[u] = __ldg(a.slots + first + u);
#pragma unroll
  for (int u = 0; u < kRows; ++u)
    rows[u] = load_constant<Format, N>(row_of<Format>(a.weights, slots[u]) + column);
  float* const out = a.out + first * a.weights.dim + column;
#pragma unroll
  for (int u = 0; u < kRows; ++u) store_streaming<Float32, N>(out + u * a.weights.dim, rows[u].unpack());
}

template <class Format, int N>
__global__ void __launch_bounds__(kBlockThreads)
    copy_rows(const __grid_constant__ LookupSequence a, const __grid_constant__ Panels panels) {
  const Team team(panels.width);
  const PanelPlace place(panels, team.index, team.lane, N);
  const int64_t first = place.row * kGroup, last = first + kGroup;
  if (place.column >= a.weights.dim) return;
  if (last <= a.count) return copy_group<Format, N, kGroup>(a, first, place.column);
#pragma unroll 1
  for (int64_t i = first; i < a.count; ++i) copy_group<Format, N, 1>(a, i, place.column);
}

template <class Format, int N>
cudaError_t launch_columns(const LookupSequence& a, cudaStream_t stream) {
  const Panels panels = panels_of(a.weights.dim, N);
  const int64_t teams = (a.count + kGroup - 1) / kGroup * panels.count;
  return launch(copy_rows<Format, N>, blocks_of(teams, panels.width), stream, a, panels);
}

}  // namespace

cudaError_t lookup_sequence(const LookupSequence& a, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  with_format(a.weights.dtype, [&](auto format) {
    using Format = decltype(format);
    const bool vectors = in_vectors<Format>(a.weights) && is_multiple(a.out, kBytes<Float32, kVector>);
    error = vectors ? launch_columns<Format, kVector>(a, stream) : launch_columns<Format, 1>(a, stream);
  });
  return error;
}

}  // namespace cuda
}  // namespace rec_sdk
