// CRC-32 as zlib has it, of the checksums of saves: with carry-less multiplication several times as fast.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rec_sdk {

// Whether this machine has the instructions; without them crc32() is slow.
bool has_carryless_multiplication();

// The checksum of `size` bytes that follow those whose checksum is `before`, 0 at first.
uint32_t crc32(const void* data, size_t size, uint32_t before = 0);

}  // namespace rec_sdk
