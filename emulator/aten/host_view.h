// Views of device memory as CPU tensors, for code that emulates work on the device.
#pragma once

#include <ATen/core/Tensor.h>

namespace rec_sdk::emulator {

// Returns a CPU tensor that shares the device memory at `device_address`. Throws c10::Error if its elements
// are not all inside one live allocation. All earlier work on the stream must have run.
at::Tensor host_view(const void* device_address, at::IntArrayRef sizes, at::IntArrayRef strides,
                     at::ScalarType type);

}  // namespace rec_sdk::emulator
