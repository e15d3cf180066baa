// Launches in the order of torch_npu's current stream.
#pragma once

#include <cstdint>
#include <functional>

namespace rec_sdk {

// Puts launch(stream) on torch_npu's task queue, for the current stream (an aclrtStream) of that device. It
// may run after this returns, and what it fails to launch is then an error of a later call, as torch_npu's
// own operators have it. `launch` owns what it uses. Memory of torch's allocator that is freed meanwhile is
// only reused behind it.
void on_current_stream(const char* op, int32_t device_index, std::function<void(void* stream)> launch);

}  // namespace rec_sdk
