// Device memory as a CPU tensor, for code that emulates work on the device.
#pragma once

#include <ATen/core/Tensor.h>

namespace rec_sdk::emulator {

// Returns a CPU tensor over the device memory at `device_address`, without a copy. Throws c10::Error if the
// elements are not all inside one live allocation. The caller must ensure that all earlier work on the stream
// has run.
at::Tensor host_view(const void* device_address, at::IntArrayRef sizes, at::IntArrayRef strides,
                     at::ScalarType type);

}  // namespace rec_sdk::emulator
