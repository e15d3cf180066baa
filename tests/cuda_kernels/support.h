// Functions for the tests of the CUDA kernels. A test runs a kernel on the host in several orders of its
// blocks and threads, and compares its results bit by bit with the CPU kernel's. Arrays have exact sizes, so
// that sanitizers find overruns.
#pragma once

#include <cuda_runtime.h>

#include "op_kernels/common/cuda/kernels.h"
#include "tests/kernels/backend.h"

namespace cuda_tests {

using kernel_tests::check_bits;
using rec_sdk::DType;

constexpr int64_t kDims[] = {1, 3, 4, 8, 16, 20, 33, 64, 100, 128, 132, 200, 1000, 4096};

// Returns `count`, reduced for wide rows so that all rows together have about `values` values; at least 4.
inline int64_t scaled(int64_t count, int64_t dim, int64_t values = 8000) {
  return std::min(count, std::max<int64_t>(4, values / dim));
}

// Calls attempt(title), which must launch a kernel and compare results, once for each order of blocks and
// threads.
template <class Attempt>
void in_every_order(const std::string& title, const Attempt& attempt) {
  for (const uint64_t order : {cuda_host::kAscending, cuda_host::kDescending, uint64_t{7}}) {
    const std::string with_order = title + ", order " + std::to_string(order);
    cuda_host::set_order(order);
    cuda_host::set_title(with_order);
    try {
      attempt(with_order);
    } catch (const cuda_host::KernelError& error) {
      std::fprintf(stderr, "%s: %s\n", with_order.c_str(), error.what());
      CHECK(false && "the kernel broke a rule");
    }
  }
}

inline const char* name_of(kernel_tests::Spacing spacing) {
  return spacing == kernel_tests::Spacing::kOdd ? "odd" : "records";
}

constexpr kernel_tests::Spacing kSpacings[] = {kernel_tests::Spacing::kOdd, kernel_tests::Spacing::kRecords};

}  // namespace cuda_tests
