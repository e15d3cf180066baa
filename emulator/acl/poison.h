// Memory that reads as 0xFF bytes, that is NaN or the index -1, until it is written. It takes host memory
// only for written pages.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

constexpr int kPoison = 0xFF;

// Maps poisoned memory at [begin, begin + bytes), whole pages, in place of the present mapping.
bool map_poisoned(char* begin, uint64_t bytes);

// Poisons part of such memory again, and returns its pages to the system.
void poison_again(char* begin, uint64_t bytes);

}  // namespace rec_sdk::emulator
