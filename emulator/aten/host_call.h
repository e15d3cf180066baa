// One call of an ATen operator on NPU tensors, carried out by its CPU kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace rec_sdk::emulator {

// Waits for the current stream, then runs the CPU kernel of `op` directly on device memory: inputs are not
// copied, and what is changed in place is changed in place, views and overlaps included. New results become
// NPU tensors.
//
// As on a device, operands must be on one device; CPU tensors are allowed where they are scalars or where the
// operator takes indices or lengths from the host. Throws c10::Error otherwise.
void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace rec_sdk::emulator
