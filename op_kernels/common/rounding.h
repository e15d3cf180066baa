// Stochastic rounding of weights to 16 bits: the random number of an element is a function of its row's key
// and its column, and the key one of the row's id and of its table's seed for this update. So it does not
// depend on slots, threads, batches or backends.
//
// Sums, products and shifts right of 32 bits only, which AscendC's vector unit has; it has no exclusive or.
// x (2x + 1), of RC6, is a bijection whose upper bits depend on all of x.
#pragma once

#include <cstdint>

#include "op_kernels/common/isa.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

constexpr uint32_t kColumnFactor = 0x9e3779b1u;
constexpr int kMixShift = 16;

// seed: of the table and the update, already well mixed.
REC_SDK_HD uint32_t row_key(int64_t id, int64_t seed) {
  constexpr uint64_t kFactor = 0xd6e8feb86659fd93u;
  uint64_t z = static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(seed);
  z = (z ^ (z >> 32)) * kFactor;
  z = (z ^ (z >> 32)) * kFactor;
  return static_cast<uint32_t>(z >> 32);
}

// The upper 16 bits are uniform, and as good as independent between columns and between rows.
REC_SDK_HD uint32_t random_bits(uint32_t key, uint32_t column) {
  uint32_t x = column * kColumnFactor + key;
  x *= 2 * x + 1;
  x += x >> kMixShift;
  return x * (2 * x + 1);
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
