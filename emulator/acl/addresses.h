// Ranges of device addresses, which no code can access. The contents of a device address are stored at a
// constant distance from it, where only the emulator accesses them. Code that uses device memory as host
// memory therefore faults immediately.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

struct AddressRange {
  uintptr_t begin = 0;
  uint64_t bytes = 0;  // the size, which is also the distance from an address to its contents
  int device = -1;     // -1: no range
};

// Reserves at least `bytes` of device addresses. The memory behind them is not accessible yet. Returns null
// if the process has no such range left.
char* reserve_addresses(uint64_t bytes, int device);
void release_addresses(char* begin);

// Returns the range that contains the address. It takes no lock, so that a signal handler may call it.
AddressRange range_of(const void* address);

inline bool is_device_address(const void* address) { return range_of(address).device >= 0; }

}  // namespace rec_sdk::emulator
