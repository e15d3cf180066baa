// How much of a device's memory is taken: by allocations, and by physical memory that is mapped by hand.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

// Counts `bytes` of physical memory; false if the device does not have them.
bool take_physical_memory(int device, uint64_t bytes);
void return_physical_memory(int device, uint64_t bytes);

uint64_t free_memory(int device);

}  // namespace rec_sdk::emulator
