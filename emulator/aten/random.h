// Random numbers of the emulated device: they follow from the state of its own generator, as on a device,
// although CPU kernels draw them.
#pragma once

#include <ATen/core/Generator.h>

#include <functional>

namespace rec_sdk::emulator {

// A CPU generator for one operator call, seeded by what `generator` (or, where it is not defined, the default
// generator of `device`) would draw next. Advances that generator.
at::Generator host_generator(at::Generator generator, c10::Device device);

// Runs `work` with the CPU's default generator seeded likewise, and restores that one afterwards. For
// operators that are random but take no generator.
void with_host_generator(c10::Device device, const std::function<void()>& work);

}  // namespace rec_sdk::emulator
