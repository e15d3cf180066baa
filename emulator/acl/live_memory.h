// The device memory that is in use: allocations, and mapped pieces of reserved address ranges.
#pragma once

#include <cstdint>
#include <string>

namespace rec_sdk::emulator {

struct LiveMemory {
  uint64_t bytes = 0;
  int device = -1;
  bool mapped = false;  // whether it is a mapped piece; adjacent pieces form one memory
};

void add_live_memory(const void* begin, const LiveMemory& memory);

// Removes the memory that begins exactly at `begin` and returns it; the device of the result is -1 if there
// is no such memory.
LiveMemory remove_live_memory(const void* begin, bool mapped);

// Returns the memory that begins exactly at `begin`; the device of the result is -1 if there is no such
// memory.
LiveMemory live_memory_at(const void* begin);

// Returns the host address of the contents of [address, address + bytes); null if the range is not inside one
// live memory. A range of 0 bytes may also begin at the end of a memory.
char* accessible(const void* address, uint64_t bytes, int* device = nullptr);

// Returns a description of a device address for error messages.
std::string describe(const void* address);

}  // namespace rec_sdk::emulator
