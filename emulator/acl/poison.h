// Poisoned memory: before it is written, all bytes are 0xFF, which is NaN or the index -1. Only written pages
// take host memory.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

constexpr int kPoison = 0xFF;

// Maps poisoned memory at [begin, begin + bytes), in place of the present mapping. The range must consist of
// whole pages.
bool map_poisoned(char* begin, uint64_t bytes);

// Poisons a part of poisoned memory again, and returns its pages to the system.
void poison_again(char* begin, uint64_t bytes);

}  // namespace rec_sdk::emulator
