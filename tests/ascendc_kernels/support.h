// What the tests of the AscendC kernels share. Each runs a kernel on the emulated vector cores and wants the
// bits of the CPU kernel; the emulator throws for whatever the hardware would not do.
#pragma once

#include <functional>
#include <stdexcept>

#include "tests/kernels/support.h"
#include "torch_npu_ext/emulator/kernels/buffers.h"

namespace ascendc_tests {

using kernel_tests::Random;
using rec_sdk::DType;

constexpr int64_t kDims[] = {1, 3, 8, 16, 20, 64, 100, 128, 200, 1000, 4096, 5000};
constexpr int64_t kCores[] = {1, 7, 48};

// Fewer for wide rows: about this many values altogether, but enough for several tiles.
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
  CHECK(found.size() == expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::memcmp(&found[i], &expected[i], sizeof(T)) == 0) continue;
    std::fprintf(stderr, "%s on %d cores: element %zu of %zu is %.9g, not %.9g\n", title.c_str(),
                 static_cast<int>(cores), i, expected.size(), static_cast<double>(found[i]),
                 static_cast<double>(expected[i]));
    CHECK(false && "the bits differ");
    return;
  }
}

inline std::string title_of(const char* kernel, int64_t dim, DType dtype, const char* variant = "") {
  return std::string(kernel) + " dim " + std::to_string(dim) + " " + kernel_tests::name_of(dtype) + " " +
         variant;
}

inline std::vector<int32_t> random_slots(Random* random, int64_t count, int64_t slots) {
  std::vector<int32_t> list;
  for (int64_t i = 0; i < count; ++i) list.push_back(random->below(slots));
  return list;
}

}  // namespace ascendc_tests
