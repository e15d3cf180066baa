// Ranges of device addresses. The pages of a range are inaccessible, so code that uses device memory as host
// memory faults immediately. The contents are stored at a constant distance from the device address, where
// only the emulator accesses them.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

struct AddressRange {
  uintptr_t begin = 0;
  uint64_t bytes = 0;  // size of the range, and distance from an address to its contents
  int device = -1;     // -1 if there is no range
};

// Reserves a range of at least `bytes` device addresses, whose contents are not accessible yet. Returns null
// if the process has no address space or slot left for it.
char* reserve_addresses(uint64_t bytes, int device);
void release_addresses(char* begin);

// Returns the range that contains the address. A signal handler may call this function, because it takes no
// lock.
AddressRange range_of(const void* address);

inline bool is_device_address(const void* address) { return range_of(address).device >= 0; }

}  // namespace rec_sdk::emulator
