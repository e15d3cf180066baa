// Random numbers of the emulated device. CPU kernels draw them, but the state of the device's generator
// determines them, as on a device.
#pragma once

#include <ATen/core/Generator.h>

#include <functional>

namespace rec_sdk::emulator {

// Returns a CPU generator for one operator call. Its seed is the next value of `generator`, which is
// advanced. If `generator` is undefined, the default generator of `device` is used.
at::Generator host_generator(at::Generator generator, c10::Device device);

// Seeds the CPU's default generator in the same way, runs `work`, and restores the generator. For random
// operators that have no generator argument.
void with_host_generator(c10::Device device, const std::function<void()>& work);

}  // namespace rec_sdk::emulator
