// Kernel launches in the order of torch_npu's current stream.
#pragma once

#include <cstdint>
#include <functional>

namespace rec_sdk {

// Puts launch(stream) on torch_npu's task queue; `stream` is the device's current stream, an aclrtStream.
// `launch` may run after this function has returned, so it must own what it uses. If it fails, a later call
// reports the error, as for torch_npu's own operators. Memory of torch's allocator that is freed before the
// launch is reused only for later work on the stream.
void on_current_stream(const char* op, int32_t device_index, std::function<void(void* stream)> launch);

}  // namespace rec_sdk
