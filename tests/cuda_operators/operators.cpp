// torch_npu_ext/cuda/operators.cpp, registered for the CPU: every header comes first, so that only the
// registration itself sees another key.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <mutex>
#include <stdexcept>
#include <string>

#include "op_kernels/common/cuda/kernels.h"
#include "torch_npu_ext/ops/device_operators.h"

namespace {

int64_t launches = 0;

}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t cuda_operators_launches() { return launches; }

// Every operator asks for the stream right before it launches. There is none here.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  ++launches;
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

namespace torch::stable::accelerator {

// There is no device to make the current one, and one machine for all threads of the program.
class NoGuard {
 public:
  explicit NoGuard(int32_t) : lock_(mutex_) {}

 private:
  static inline std::mutex mutex_;
  std::lock_guard<std::mutex> lock_;
};

}  // namespace torch::stable::accelerator

#define DeviceGuard NoGuard
#define CUDA CPU
#include "torch_npu_ext/cuda/operators.cpp"
