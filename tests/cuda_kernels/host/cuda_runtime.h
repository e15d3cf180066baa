// The parts of CUDA that the kernels use, for the host compiler. Every thread of a block is a fiber; see
// machine.h.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "tests/cuda_kernels/host/machine.h"

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
// Shared memory is thread-local memory of the program or library. The machine reinitializes all of it for
// every block.
#define __shared__ static thread_local

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = struct CUstream_st*;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

enum cudaMemoryType { cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2 };

struct cudaPointerAttributes {
  cudaMemoryType type;
  void* devicePointer;
};

namespace cuda_host {

// The memory type that cudaPointerGetAttributes returns for every pointer. Tests set it.
inline cudaMemoryType memory_type = cudaMemoryTypeDevice;

}  // namespace cuda_host

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {cuda_host::memory_type, const_cast<void*>(pointer)};
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "invalid configuration";
}

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

#define REC_SDK_CUDA_VECTORS(type, name)                   \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; }; \
  struct alignas(4 * sizeof(type)) name##4 { type x, y, z, w; };

REC_SDK_CUDA_VECTORS(float, float)
REC_SDK_CUDA_VECTORS(int, int)
REC_SDK_CUDA_VECTORS(unsigned, uint)
#undef REC_SDK_CUDA_VECTORS

template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  *to = value;
}
template <class T>
void __stcg(T* to, T value) {
  *to = value;
}

inline void __syncthreads(cuda_host::Place place = cuda_host::Place::caller()) {
  cuda_host::wait_for_block(place);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, cuda_host::Place place = cuda_host::Place::caller()) {
  cuda_host::exchange({"__syncwarp", place, mask, cuda_host::lane(), 0});
}

namespace cuda_host {

template <class T>
T shuffle(const char* name, Place place, unsigned mask, T value, int source) {
  static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8), "no such shuffle");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange({name, place, mask, source, bits});
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace cuda_host

// Source lanes are as in section "shfl.sync" of the PTX manual: a lane whose source is outside its segment
// reads its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              cuda_host::Place place = cuda_host::Place::caller()) {
  const int segment = cuda_host::segment_start(width, place);
  return cuda_host::shuffle("__shfl_sync", place, mask, value, segment + (source & (width - 1)));
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  cuda_host::Place place = cuda_host::Place::caller()) {
  const int last = cuda_host::segment_start(width, place) + width - 1, source = cuda_host::lane() ^ lane_mask;
  return cuda_host::shuffle("__shfl_xor_sync", place, mask, value,
                            source <= last ? source : cuda_host::lane());
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   cuda_host::Place place = cuda_host::Place::caller()) {
  const int last = cuda_host::segment_start(width, place) + width - 1;
  const int source = cuda_host::lane() + static_cast<int>(delta);
  return cuda_host::shuffle("__shfl_down_sync", place, mask, value,
                            source <= last ? source : cuda_host::lane());
}

// Runs the kernel and returns when it has ended. Throws cuda_host::KernelError if the launch is invalid, or
// if the kernel performs an invalid operation.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> copies(arguments...);
  cuda_host::run(reinterpret_cast<const void*>(kernel), config->gridDim, config->blockDim,
                 [&] { std::apply(kernel, copies); });
  return cudaSuccess;
}
