// Stochastic rounding of weights to 16 bits: the random number of an element is a function of its column, its
// row's id and its table's seed for this update. So it does not depend on slots, threads, batches or
// backends.
#pragma once

#include <cstdint>

#include "op_kernels/common/isa.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

// The random numbers of one row in one update: start + column * step. Start and step are close to independent
// and uniform. So each number is uniform, and the numbers of any two columns are independent. Sums of
// rounding errors therefore have the variance of independent errors. Of three columns, two determine the
// third.
struct RowNumbers {
  uint32_t start, step;

  // Returns the random number of a column; use only its upper 16 bits.
  REC_SDK_HD uint32_t at(uint32_t column) const { return start + column * step; }
};

// Computes the random numbers of a row from a hash of its id and a seed. `seed` belongs to the table and this
// update; its bits must already be well mixed.
REC_SDK_HD RowNumbers row_numbers(int64_t id, int64_t seed) {
  constexpr uint64_t kFactor = 0xd6e8feb86659fd93u;
  uint64_t z = static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(seed);
  z = (z ^ (z >> 32)) * kFactor;
  z = (z ^ (z >> 32)) * kFactor;
  return {static_cast<uint32_t>(z >> 32), static_cast<uint32_t>(z)};
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
