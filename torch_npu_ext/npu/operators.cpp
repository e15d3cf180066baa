// The operators on an NPU, launched on torch_npu's current stream.
#include <torch/csrc/stable/library.h>

#include <string>
#include <utility>

#include "op_kernels/common/ascendc/launch.h"
#include "torch_npu_ext/npu/launch.h"
#include "torch_npu_ext/ops/device_operators.h"

namespace rec_sdk {
namespace {

// Each launch function copies its arguments into the task queue.
struct OnNpu {
#define REC_SDK_ON_NPU(name, Arguments)                     \
  static void name(const Tensor& on, const Arguments& a) {  \
    launch("rec_sdk_" #name, on, rec_sdk_launch_##name, a); \
  }
  REC_SDK_OPERATORS(REC_SDK_ON_NPU)
  REC_SDK_JOINED_OPERATORS(REC_SDK_ON_NPU)
#undef REC_SDK_ON_NPU
  static void update_rows(const Tensor& on, const UpdateRows& a, std::string optimizer, void* workspace) {
    on_current_stream(
        "rec_sdk_update_rows", on.get_device_index(),
        [a, workspace, name = std::move(optimizer), grads = grads_of(a.segments)](void* stream) {
          UpdateRows rows = a;
          rows.segments.lookups.grads = grads.data();
          rec_sdk_launch_update_rows(stream, &rows, name.c_str(), workspace);
        });
  }
  static void accumulate_rows(const Tensor& on, const AccumulateRows& a, void* workspace) {
    on_current_stream("rec_sdk_accumulate_rows", on.get_device_index(),
                      [a, workspace, grads = grads_of(a.segments)](void* stream) {
                        AccumulateRows rows = a;
                        rows.segments.lookups.grads = grads.data();
                        rec_sdk_launch_accumulate_rows(stream, &rows, workspace);
                      });
  }
  static int64_t segments_workspace(const Segments& segments) {
    return rec_sdk_segments_workspace(&segments);
  }

  // Kernels cannot access host memory.
  static void* host_rows(const Tensor&, const Tensor&) { return nullptr; }

 private:
  static Gradients grads_of(const Segments& segments) {
    return Gradients(segments.lookups.grads, segments.lookups.grads + segments.lookups.grad_count);
  }

  template <class Arguments>
  static void launch(const char* op, const Tensor& on, void (*kernel)(void*, const Arguments*),
                     const Arguments& a) {
    on_current_stream(op, on.get_device_index(), [kernel, a](void* stream) { kernel(stream, &a); });
  }
};

// Launches a kernel on 0 cores, which fails. npu_check uses it to test that a failed launch is reported like
// the failure of an operator.
void launch_on_no_cores(const Tensor& on) {
  on_current_stream("rec_sdk_launch_on_no_cores", on.get_device_index(), rec_sdk_launch_on_no_cores);
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY(rec_sdk_npu, m) { m.def("launch_on_no_cores(Tensor on) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(rec_sdk_npu, PrivateUse1, m) {
  m.impl("launch_on_no_cores", TORCH_BOX(&rec_sdk::launch_on_no_cores));
}

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, PrivateUse1, m) {
  rec_sdk::DeviceOperators<rec_sdk::OnNpu>::register_in(m);
}
