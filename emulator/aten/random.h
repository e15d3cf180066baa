// Random numbers of the emulated device: they are drawn by CPU kernels but determined by the state of the
// device's generator, as on a device.
#pragma once

#include <ATen/core/Generator.h>

#include <functional>

namespace rec_sdk::emulator {

// Returns a CPU generator for one operator call, seeded with the next value of `generator` (or, if it is
// undefined, of `device`'s default generator), which is advanced.
at::Generator host_generator(at::Generator generator, c10::Device device);

// Runs `work` with the CPU's default generator seeded in the same way, and restores that generator
// afterwards. For random operators without a generator argument.
void with_host_generator(c10::Device device, const std::function<void()>& work);

}  // namespace rec_sdk::emulator
