#include "torch_npu_ext/npu/launch.h"

#include <torch_npu/csrc/core/npu/NPUGuard.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <utility>

#include "op_kernels/common/ascendc/launch.h"

namespace rec_sdk {

void on_current_stream(const char* op, int32_t device_index, std::function<void(void* stream)> launch) {
  const auto device = static_cast<c10::DeviceIndex>(device_index);
  const c10_npu::NPUGuard guard(device);
  // stream(false) returns the stream's handle at once; stream() would first wait until the task queue is
  // empty.
  aclrtStream stream = c10_npu::getCurrentNPUStream(device).stream(false);
  at_npu::native::OpCommand::RunOpApiV2(op, [stream, launch = std::move(launch)]() -> int {
    rec_sdk_ascendc_take_error();  // clears an error that was reported for an earlier call
    launch(stream);
    return rec_sdk_ascendc_take_error();
  });
}

}  // namespace rec_sdk
