// CRC-32 compatible with zlib. On CPUs with carry-less multiplication it is several times as fast as without.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rec_sdk {

// Returns whether this CPU has carry-less multiplication; crc32() is slow without it.
bool has_carryless_multiplication();

// Returns the checksum of `size` bytes. To continue a checksum, `before` is the checksum of the preceding
// bytes.
uint32_t crc32(const void* data, size_t size, uint32_t before = 0);

}  // namespace rec_sdk
