// A call of an ATen operator on NPU tensors, executed by its CPU kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace rec_sdk::emulator {

// Waits for the current stream, then runs the CPU kernel of `op` directly on device memory: inputs are not
// copied, and in-place changes happen in place, including views and overlaps. New results become NPU tensors.
//
// As on a device, operands must be on one device; CPU tensors are allowed if they are scalars, or if the
// operator reads indices or lengths on the host. Throws c10::Error otherwise.
void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace rec_sdk::emulator
