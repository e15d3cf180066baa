// Ranges of device addresses. No code can access them; what a device address holds lies behind it, at a
// constant distance, where only the emulator looks. So code that takes device memory for host memory faults
// at once.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

struct AddressRange {
  uintptr_t begin = 0;
  uint64_t bytes = 0;  // the size, and the distance from an address to what it holds
  int device = -1;     // -1: no range
};

// Reserves at least `bytes` of device addresses. The memory behind them is not accessible yet either. Null if
// the process has no such range left.
char* reserve_addresses(uint64_t bytes, int device);
void release_addresses(char* begin);

// The range that holds the address. Takes no lock, so that a signal handler may ask.
AddressRange range_of(const void* address);

inline bool is_device_address(const void* address) { return range_of(address).device >= 0; }

}  // namespace rec_sdk::emulator
