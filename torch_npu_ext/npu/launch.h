// Launches in the order of torch_npu's current stream.
#pragma once

#include <cstdint>
#include <functional>

namespace rec_sdk {

// Puts launch(stream) on torch_npu's task queue, for the current stream (an aclrtStream) of the device. It
// may run after this function returns; a failed launch is then reported by a later call, as for torch_npu's
// own operators. `launch` must own what it uses. Memory of torch's allocator that is freed meanwhile is
// reused only after the launch on the stream.
void on_current_stream(const char* op, int32_t device_index, std::function<void(void* stream)> launch);

}  // namespace rec_sdk
