// The random number generator Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC 2011).
#pragma once

#include <array>
#include <cstdint>

namespace rec_sdk {

constexpr int kPhiloxRounds = 10;

// One round, inline so that a loop over many counters vectorizes.
inline __attribute__((always_inline)) void philox_round(uint32_t* c0, uint32_t* c1, uint32_t* c2,
                                                        uint32_t* c3, std::array<uint32_t, 2> key) {
  const uint64_t a = uint64_t{0xD2511F53u} * *c0;
  const uint64_t b = uint64_t{0xCD9E8D57u} * *c2;
  *c0 = static_cast<uint32_t>(b >> 32) ^ *c1 ^ key[0];
  *c1 = static_cast<uint32_t>(b);
  *c2 = static_cast<uint32_t>(a >> 32) ^ *c3 ^ key[1];
  *c3 = static_cast<uint32_t>(a);
}

inline std::array<uint32_t, 2> next_philox_key(std::array<uint32_t, 2> key) {
  return {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
}

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    philox_round(&counter[0], &counter[1], &counter[2], &counter[3], key);
    key = next_philox_key(key);
  }
  return counter;
}

}  // namespace rec_sdk
