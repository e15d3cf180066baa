// Functions for the tests of the AscendC kernels. A test runs a kernel on the emulated vector cores and
// compares its results bit by bit with the CPU kernel's. The emulator throws for operations that the hardware
// does not allow.
#pragma once

#include <functional>
#include <stdexcept>

#include "emulator/kernels/buffers.h"
#include "tests/kernels/backend.h"

namespace ascendc_tests {

using kernel_tests::random_slots;
using kernel_tests::title_of;
using rec_sdk::DType;

constexpr int64_t kDims[] = {1, 3, 8, 16, 20, 64, 100, 128, 200, 1000, 4096, 5000};
constexpr int64_t kCores[] = {1, 7, 48};

// Returns widths of rows from 1 to 100,000. Full tests have many more: steps of about 10 %, and for each
// width the next smaller and larger one.
inline std::vector<int64_t> widths() {
  if (!full_tests()) return {7, 129, 8193, 42503, 100000};
  std::vector<int64_t> list;
  for (int64_t width = 1; width <= 100000; width += 1 + width / 10) {
    for (int64_t near = width - 1; near <= width + 1; ++near) list.push_back(std::max<int64_t>(1, near));
  }
  list.push_back(100000);
  return list;
}

// Returns `count`, reduced for wide rows so that all rows together have about kValues values; at least 40,
// which are enough for several tiles.
inline int64_t scaled(int64_t count, int64_t dim) {
  constexpr int64_t kValues = 200000;
  return std::min(count, std::max<int64_t>(40, kValues / dim));
}

inline void run(const std::string& title, int64_t cores, const rec_sdk::emulator::Buffers& buffers,
                const std::function<void()>& body) {
  try {
    rec_sdk::emulator::run_kernel(title.c_str(), cores, buffers.list(), body);
  } catch (const rec_sdk::emulator::KernelError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    CHECK(false && "the kernel broke a rule");
  }
}

template <class T>
void check_bits(const std::string& title, int64_t cores, const std::vector<T>& found,
                const std::vector<T>& expected) {
  kernel_tests::check_bits(title + " on " + std::to_string(cores) + " cores", found, expected);
}

}  // namespace ascendc_tests
