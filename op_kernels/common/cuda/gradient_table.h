// The table of gradients on the device. Lanes of a warp read different positions of it, which is faster in
// global memory than in kernel parameters. A separate kernel receives the table as parameters and writes it
// to global memory, so that the host does not wait for a copy.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "op_kernels/common/arguments.h"
#include "op_kernels/common/cuda/launch.h"

namespace rec_sdk {
namespace cuda {

// A part of the table that is passed as kernel parameters: 2 KB of the 4 KB that a kernel may have.
struct GradientTablePart {
  static constexpr int kMost = 64;
  Gradient grads[kMost];
};

// Returns the bytes of the table in the workspace, a multiple of 16; 0 if there is only one gradient.
constexpr int64_t gradient_table_bytes(const Lookups& lookups) {
  static_assert(sizeof(Gradient) % 16 == 0, "what follows the table must stay aligned");
  return lookups.grad_source != nullptr ? lookups.grad_count * static_cast<int64_t>(sizeof(Gradient)) : 0;
}

// A template, because the sources of several operators include and compile it.
template <class Part>
__global__ void __launch_bounds__(kBlockThreads)
    write_gradient_table(const __grid_constant__ Part part, int count, Gradient* to) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) to[i] = part.grads[i];
}

// Writes the table of gradients to the workspace if there are several, and sets lookups->grads to it.
// lookups->grad becomes the base address, relative to which kernels compute the addresses of gradients.
inline cudaError_t put_gradient_table(Lookups* lookups, void* workspace, cudaStream_t stream) {
  if (lookups->grad_source == nullptr) return cudaSuccess;
  Gradient* table = static_cast<Gradient*>(workspace);
  for (int64_t first = 0; first < lookups->grad_count; first += GradientTablePart::kMost) {
    const int64_t rest = lookups->grad_count - first;
    const int count = static_cast<int>(rest < GradientTablePart::kMost ? rest : GradientTablePart::kMost);
    GradientTablePart part{};
    for (int i = 0; i < count; ++i) {
      part.grads[i] = lookups->grads[first + i];
      if (lookups->grad.data == nullptr)
        lookups->grad = part.grads[i];  // a gradient without rows may have no address
    }
    const cudaError_t error =
        launch(write_gradient_table<GradientTablePart>, 1, stream, part, count, table + first);
    if (error != cudaSuccess) return error;
  }
  lookups->grads = table;
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace rec_sdk
