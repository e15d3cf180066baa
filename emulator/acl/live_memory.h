// The device memory in use: allocations, and mapped pieces of reserved ranges.
#pragma once

#include <cstdint>
#include <string>

namespace rec_sdk::emulator {

struct LiveMemory {
  uint64_t bytes = 0;
  int device = -1;
  bool mapped = false;  // a piece of a reserved range; adjacent pieces form one memory
};

void add_live_memory(const void* begin, const LiveMemory& memory);

// Removes the memory that begins exactly at `begin`; the result's device is -1 if there is none.
LiveMemory remove_live_memory(const void* begin, bool mapped);

// Returns the memory that begins exactly at `begin`, or device -1.
LiveMemory live_memory_at(const void* begin);

// Returns the host address of [address, address + bytes), or null if that is not inside one live memory. The
// address just behind a memory is inside for 0 bytes.
char* accessible(const void* address, uint64_t bytes, int* device = nullptr);

// Describes a device address for error messages.
std::string describe(const void* address);

}  // namespace rec_sdk::emulator
