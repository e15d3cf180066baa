// The physical memory of each device that is in use: by allocations, and by memory that is mapped explicitly.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

// Reserves `bytes` of physical memory; returns false if the device does not have them.
bool take_physical_memory(int device, uint64_t bytes);
void return_physical_memory(int device, uint64_t bytes);

uint64_t free_memory(int device);

}  // namespace rec_sdk::emulator
