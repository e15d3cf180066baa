// All device memory that may be used at the moment: allocations, and mapped pieces of reserved ranges.
#pragma once

#include <cstdint>
#include <string>

namespace rec_sdk::emulator {

struct LiveMemory {
  uint64_t bytes = 0;
  int device = -1;
  bool mapped = false;  // a piece of a reserved range: neighbouring pieces are one memory
};

void add_live_memory(const void* begin, const LiveMemory& memory);

// Forgets the memory that begins exactly there; device -1 in the result if there is none.
LiveMemory remove_live_memory(const void* begin, bool mapped);

// The same, without forgetting it.
LiveMemory live_memory_at(const void* begin);

// Where the emulator can access [address, address + bytes), or null if that is not inside one live memory.
// The address just behind a memory is inside for 0 bytes.
char* accessible(const void* address, uint64_t bytes, int* device = nullptr);

// For messages: what is known about a device address.
std::string describe(const void* address);

}  // namespace rec_sdk::emulator
