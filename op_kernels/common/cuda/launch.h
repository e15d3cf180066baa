// Kernel launches, and the assignment of threads to rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace rec_sdk {
namespace cuda {

constexpr int kWarp = 32;
constexpr int kBlockThreads = 256;

// Starts kernel(arguments...) on `blocks` blocks of kBlockThreads threads; does nothing if blocks is 0.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, cudaStream_t stream,
                   const Arguments&... arguments) {
  constexpr int64_t kMostBlocks = 0x7fffffff;
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kBlockThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Returns the width of a team: the 4, 8, 16 or 32 neighbouring threads of a warp that share a row, each with
// `elements` consecutive columns; wider rows take several rounds.
constexpr int team_width(int64_t dim, int elements) {
  int width = 4;
  while (width < kWarp && width * elements < dim) width *= 2;
  return width;
}

// Returns the number of blocks that `teams` teams of that width need.
constexpr int64_t blocks_of(int64_t teams, int width) {
  const int64_t per_block = kBlockThreads / width;
  return (teams + per_block - 1) / per_block;
}

// This thread's position in its team.
struct Team {
  int width;
  int lane;       // in [0, width)
  unsigned mask;  // mask of the team's threads in the warp
  int place;      // index of the team in its block
  int64_t index;  // index of the team in the grid

  explicit __device__ __forceinline__ Team(int threads)
      : width(threads), lane(static_cast<int>(threadIdx.x) & (threads - 1)) {
    const int shift = 2 + (threads > 4) + (threads > 8) + (threads > 16);  // avoids slow integer division
    const unsigned lanes = threads == kWarp ? 0xffffffffu : (1u << threads) - 1;
    mask = lanes << (static_cast<int>(threadIdx.x) % kWarp - lane);
    place = static_cast<int>(threadIdx.x) >> shift;
    index = static_cast<int64_t>(blockIdx.x) * (kBlockThreads >> shift) + place;
  }
};

}  // namespace cuda
}  // namespace rec_sdk
