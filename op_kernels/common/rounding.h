// Stochastic rounding of weights to 16 bits: the random number of an element is a function of its column, its
// row's id and its table's seed for this update. So it does not depend on slots, threads, batches or
// backends.
#pragma once

#include <cstdint>

#include "op_kernels/common/isa.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

// The random numbers of one row in one update. Start and step are as good as independent and uniform: then
// each number is uniform, and any two of different columns are independent, so that sums of rounding errors
// have the variance of independent ones. For three columns, the third follows from the others.
struct RowNumbers {
  uint32_t start, step;

  // The upper 16 bits are for use.
  REC_SDK_HD uint32_t at(uint32_t column) const { return start + column * step; }
};

// seed: of the table and the update, already well mixed.
REC_SDK_HD RowNumbers row_numbers(int64_t id, int64_t seed) {
  constexpr uint64_t kFactor = 0xd6e8feb86659fd93u;
  uint64_t z = static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(seed);
  z = (z ^ (z >> 32)) * kFactor;
  z = (z ^ (z >> 32)) * kFactor;
  return {static_cast<uint32_t>(z >> 32), static_cast<uint32_t>(z)};
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
