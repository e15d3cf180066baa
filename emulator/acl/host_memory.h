// Host memory that the devices know: pinned. Asynchronous copies need it to be asynchronous.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

enum class HostMemory { kPageable, kPinned, kPartlyPinned };

// The kind of [address, address + bytes); kPartlyPinned if it begins in pinned memory and goes past its end.
HostMemory host_memory_at(const void* address, uint64_t bytes);

}  // namespace rec_sdk::emulator
