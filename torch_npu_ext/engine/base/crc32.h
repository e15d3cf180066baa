// CRC-32 compatible with zlib, several times as fast where the CPU has carry-less multiplication.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rec_sdk {

// Returns whether this CPU has carry-less multiplication; crc32() is slow without it.
bool has_carryless_multiplication();

// Returns the checksum of `size` bytes that follow bytes with checksum `before`, 0 at first.
uint32_t crc32(const void* data, size_t size, uint32_t before = 0);

}  // namespace rec_sdk
