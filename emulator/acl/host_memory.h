// Pinned host memory, which asynchronous copies need to be asynchronous.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

enum class HostMemory { kPageable, kPinned, kPartlyPinned };

// Returns the kind of [address, address + bytes); kPartlyPinned if it starts in pinned memory and ends
// outside of it.
HostMemory host_memory_at(const void* address, uint64_t bytes);

}  // namespace rec_sdk::emulator
