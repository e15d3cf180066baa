// Calls of ATen operators on NPU tensors, executed by their CPU kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace rec_sdk::emulator {

// Waits for the current stream, and then runs the CPU kernel of `op` directly on device memory. Inputs are
// not copied, and in-place operators change their arguments in place, also if these are views or overlap. New
// results are returned as NPU tensors.
//
// As on a device, all operands must be on the same device. CPU tensors are allowed only for scalars, and for
// indices or lengths that the operator reads on the host. Otherwise throws c10::Error.
void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace rec_sdk::emulator
