// Functions for the tests of other backends, which compare a kernel's results bit by bit with the CPU
// kernel's results.
#pragma once

#include <numeric>

#include "tests/kernels/support.h"

namespace kernel_tests {

// The distances between rows. kOdd: not rounded up, so that rows need not be aligned. kRecords: rows start
// at multiples of 16 bytes, as in records with states; if dim is a multiple of 4, columns start at multiples
// of 4 values.
enum class Spacing { kOdd, kRecords };

inline std::string title_of(const char* kernel, int64_t dim, DType dtype, const std::string& variant = "") {
  return std::string(kernel) + " dim " + std::to_string(dim) + " " + name_of(dtype) + " " + variant;
}

template <class T>
void check_bits(const std::string& title, const std::vector<T>& found, const std::vector<T>& expected) {
  CHECK(found.size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::memcmp(&found[i], &expected[i], sizeof(T)) == 0) continue;
    std::fprintf(stderr, "%s: element %zu of %zu is %.9g, not %.9g\n", title.c_str(), i, expected.size(),
                 static_cast<double>(found[i]), static_cast<double>(expected[i]));
    CHECK(false && "the bits differ");
    return;
  }
}

inline std::vector<int32_t> random_slots(Random* random, int64_t count, int64_t slots) {
  std::vector<int32_t> list;
  for (int64_t i = 0; i < count; ++i) list.push_back(random->below(slots));
  return list;
}

// Returns `count` random slots without duplicates.
inline std::vector<int32_t> distinct_slots(Random* random, int64_t count, int64_t slots) {
  std::vector<int32_t> all(static_cast<size_t>(slots));
  std::iota(all.begin(), all.end(), 0);
  for (int64_t i = 0; i < count; ++i) std::swap(all[i], all[i + random->below(slots - i)]);
  all.resize(static_cast<size_t>(count));
  return all;
}

inline std::vector<uint8_t> random_bytes(Random* random, int64_t count) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random->bits());
  return bytes;
}

}  // namespace kernel_tests
