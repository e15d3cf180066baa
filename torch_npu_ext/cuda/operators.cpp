// The operators on CUDA, launched on torch's current stream.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>

#include "op_kernels/common/cuda/kernels.h"
#include "torch_npu_ext/ops/device_operators.h"

namespace rec_sdk {
namespace {

// Makes the device of `on` the current device and calls launch(stream) with its current stream.
template <class Launch>
void on_current_stream(const char* op, const Tensor& on, const Launch& launch) {
  const int32_t device = on.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const cudaError_t error = launch(static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error; otherwise torch would report it again for its own next kernel
  throw std::runtime_error(std::string("rec_sdk::") + op + ": CUDA kernel: " + cudaGetErrorString(error));
}

struct OnCuda : SeparateLaunches<OnCuda> {
#define REC_SDK_ON_CUDA(name, Arguments) \
  static void name(const Tensor& on, const Arguments& a) { launch(#name, on, cuda::name, a); }
  REC_SDK_OPERATORS(REC_SDK_ON_CUDA)
#undef REC_SDK_ON_CUDA
  static void update_rows(const Tensor& on, const UpdateRows& a, const std::string& optimizer,
                          void* workspace) {
    on_current_stream("update_rows", on, [&](cudaStream_t stream) {
      return cuda::update_rows(a, optimizer.c_str(), workspace, stream);
    });
  }
  static void accumulate_rows(const Tensor& on, const AccumulateRows& a, void* workspace) {
    on_current_stream("accumulate_rows", on,
                      [&](cudaStream_t stream) { return cuda::accumulate_rows(a, workspace, stream); });
  }
  static int64_t segments_workspace(const Segments& segments) { return cuda::segments_workspace(segments); }

  // Returns the device address of rows in pinned host memory, which kernels can access; null for other
  // memory.
  static void* host_rows(const Tensor& cache, const Tensor& rows) {
    if (rows.is_cuda() || !cache.is_cuda()) return nullptr;
    const torch::stable::accelerator::DeviceGuard guard(cache.get_device_index());
    cudaPointerAttributes found{};
    const cudaError_t error = cudaPointerGetAttributes(&found, rows.data_ptr());
    if (error != cudaSuccess) cudaGetLastError();  // clears the error, so that torch does not report it
    return error == cudaSuccess && found.type == cudaMemoryTypeHost ? found.devicePointer : nullptr;
  }

 private:
  template <class Arguments>
  static void launch(const char* op, const Tensor& on, cudaError_t (*kernel)(const Arguments&, cudaStream_t),
                     const Arguments& a) {
    on_current_stream(op, on, [&](cudaStream_t stream) { return kernel(a, stream); });
  }
};

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CUDA, m) { rec_sdk::DeviceOperators<rec_sdk::OnCuda>::register_in(m); }
