// Pinned host memory. Without it, asynchronous copies are synchronous.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

enum class HostMemory { kPageable, kPinned, kPartlyPinned };

// Returns the kind of memory of [address, address + bytes). It is kPartlyPinned if the range begins in pinned
// memory and ends outside of it.
HostMemory host_memory_at(const void* address, uint64_t bytes);

}  // namespace rec_sdk::emulator
