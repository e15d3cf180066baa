// Memory that reads as 0xFF bytes, NaN or the index -1, until something is written to it. It takes host
// memory only for the pages that are written.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

constexpr int kPoison = 0xFF;

// Puts poisoned memory at [begin, begin + bytes), whole pages, in place of what is mapped there.
bool map_poisoned(char* begin, uint64_t bytes);

// Poisons part of such memory again, and gives its pages back to the system.
void poison_again(char* begin, uint64_t bytes);

}  // namespace rec_sdk::emulator
