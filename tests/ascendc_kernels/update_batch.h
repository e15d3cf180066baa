// Functions that run updates of a batch on the emulated cores and compare them with the CPU kernels.
#pragma once

#include "emulator/kernels/update_kernels.h"
#include "tests/ascendc_kernels/support.h"
#include "tests/kernels/update_batch.h"

namespace ascendc_tests {

using Batch = kernel_tests::UpdateBatch;
using kernel_tests::kOptimizers;
using kernel_tests::OptimizerCase;
using kernel_tests::states_of;
using kernel_tests::Tables;

// Launch a kernel on the emulated cores; these functions are compiled only once for all tests. Error messages
// name the kernel, preceded by `title`.
void run_update_rows(const std::string& title, const rec_sdk::UpdateRows& a, const char* optimizer,
                     void* workspace, int64_t cores);
void run_accumulate_rows(const std::string& title, const rec_sdk::AccumulateRows& a, void* workspace,
                         int64_t cores);

// Returns a workspace filled with 0xA5, as results must not depend on its contents.
inline std::vector<uint8_t> workspace_for(const Batch& batch) {
  return std::vector<uint8_t>(static_cast<size_t>(rec_sdk::ascendc::workspace_bytes(batch.segments())), 0xA5);
}

// Compares an update on the emulated cores with the CPU's; for 16-bit weights also with stochastic rounding.
// Every second update writes norms.
template <class Check>
void check_update(const Batch& batch, const kernel_tests::Cache& cache, const OptimizerCase& optimizer,
                  const std::string& title, const std::vector<int64_t>& core_counts, const Check& check,
                  bool stochastic = false) {
  const Tables tables(optimizer, batch.rows(), stochastic);
  static int64_t updates = 0;
  std::vector<float> norms = kernel_tests::norms_for(batch);
  const bool counts = updates++ % 2 == 0;
  const std::vector<uint8_t> expected =
      kernel_tests::updated_on_cpu(batch, tables, optimizer.name, cache, counts ? &norms : nullptr);
  for (const int64_t cores : core_counts) {
    std::vector<uint8_t> found = cache.bytes, workspace = workspace_for(batch);
    std::vector<float> counted = kernel_tests::norms_for(batch);
    const rec_sdk::UpdateRows a =
        kernel_tests::update_arguments(batch, tables, cache, &found, counts ? &counted : nullptr);
    run_update_rows(title, a, optimizer.name, workspace.data(), cores);
    check(title, cores, found, expected);
    check_bits(title + " norms", cores, kernel_tests::with_one_nan(counted),
               kernel_tests::with_one_nan(norms));
  }
  const bool rounds = cache.layout.weight_dtype != rec_sdk::DType::kFloat32;
  if (rounds && !stochastic)
    check_update(batch, cache, optimizer, title + " stochastic", core_counts, check, true);
}

inline void check_accumulate(const Batch& batch, kernel_tests::Random* random, const std::string& title,
                             const std::vector<int64_t>& core_counts) {
  const std::vector<float> before = kernel_tests::random_floats(random, batch.slots * 2 * batch.dim);
  const std::vector<float> expected = kernel_tests::accumulated_on_cpu(batch, before);
  for (const int64_t cores : core_counts) {
    std::vector<float> found = before;
    std::vector<uint8_t> workspace = workspace_for(batch);
    const rec_sdk::AccumulateRows a{batch.segments(), found.data(), batch.slots};
    run_accumulate_rows(title, a, workspace.data(), cores);
    check_bits(title, cores, found, expected);
  }
}

}  // namespace ascendc_tests
