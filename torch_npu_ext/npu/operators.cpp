// The operators on an NPU: launches on torch_npu's current stream.
#include <torch/csrc/stable/library.h>

#include <string>
#include <utility>

#include "op_kernels/common/ascendc/launch.h"
#include "torch_npu_ext/npu/launch.h"
#include "torch_npu_ext/ops/device_operators.h"

namespace rec_sdk {
namespace {

// Each launch copies its arguments into the task queue.
struct OnNpu {
  static void lookup_sequence(const Tensor& on, const LookupSequence& a) {
    launch("rec_sdk_lookup_sequence", on, rec_sdk_launch_lookup_sequence, a);
  }
  static void lookup_pooled(const Tensor& on, const LookupPooled& a) {
    launch("rec_sdk_lookup_pooled", on, rec_sdk_launch_lookup_pooled, a);
  }
  static void pooled_weights_grad(const Tensor& on, const PooledWeightsGrad& a) {
    launch("rec_sdk_pooled_weights_grad", on, rec_sdk_launch_pooled_weights_grad, a);
  }
  static void gather_rows(const Tensor& on, const CopyRows& a) {
    launch("rec_sdk_gather_rows", on, rec_sdk_launch_gather_rows, a);
  }
  static void scatter_rows(const Tensor& on, const CopyRows& a) {
    launch("rec_sdk_scatter_rows", on, rec_sdk_launch_scatter_rows, a);
  }
  static void swap_rows(const Tensor& on, const SwapRows& a) {
    launch("rec_sdk_swap_rows", on, rec_sdk_launch_swap_rows, a);
  }
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

  // Host memory is not reached.
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

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, PrivateUse1, m) {
  rec_sdk::DeviceOperators<rec_sdk::OnNpu>::register_in(m);
}
