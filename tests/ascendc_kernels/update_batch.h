// A batch of gradients as segments, and what the CPU kernels make of it.
#pragma once

#include <limits>

#include "tests/ascendc_kernels/support.h"
#include "torch_npu_ext/emulator/kernels/update_kernels.h"

namespace ascendc_tests {

struct Batch {
  int64_t dim, stride, slots;
  std::vector<float> grad, scale;
  std::vector<int32_t> unique_slots, offsets, grad_row, grad_column;
  static constexpr int64_t kGradRows = 500;

  // lengths: lookups of each row. Scaled ones have a scale and a column for each lookup, as pooled lookups
  // have.
  Batch(Random* random, int64_t dim_, const std::vector<int32_t>& lengths, bool scaled)
      : dim(dim_), stride(dim_ + 9), offsets{0} {
    for (const int32_t length : lengths) offsets.push_back(offsets.back() + length);
    slots = rows() + 5;
    unique_slots.resize(lengths.size());
    for (int64_t u = 0; u < rows(); ++u) unique_slots[u] = static_cast<int32_t>(u);
    for (int64_t u = 0; u < rows(); ++u) std::swap(unique_slots[u], unique_slots[random->below(rows())]);
    grad = kernel_tests::random_floats(random, kGradRows * stride);
    for (int64_t j = 0; j < lookups(); ++j) grad_row.push_back(random->below(kGradRows));
    if (!scaled) return;
    scale = kernel_tests::random_floats(random, lookups());
    for (int64_t j = 0; j < lookups(); ++j) grad_column.push_back(random->below(9));
  }

  int64_t rows() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t lookups() const { return offsets.back(); }

  rec_sdk::Segments segments() const {
    rec_sdk::Segments all{};
    all.lookups = {grad.data(),
                   stride,
                   grad_row.data(),
                   grad_column.empty() ? nullptr : grad_column.data(),
                   scale.empty() ? nullptr : scale.data(),
                   lookups(),
                   kGradRows,
                   stride};
    all.dim = dim;
    all.unique_slots = unique_slots.data();
    all.offsets = offsets.data();
    all.rows = rows();
    return all;
  }
};

struct OptimizerCase {
  const char* name;
  std::vector<int64_t> states;      // elements; 0 stands for dim
  std::vector<float> coefficients;  // from [1] on
};

inline const OptimizerCase kOptimizers[] = {
    {"sgd", {}, {0.1f}},
    {"adagrad", {0}, {0.1f, 1e-8f}},
    {"rowwise_adagrad", {1}, {0.1f, 1e-8f}},
    {"adam", {0, 0}, {0.01f, 1e-8f, 0.1f, 0.001f, 1.25f}},
};

// Four tables, one without rows and the last with clipping; each learns at another rate.
struct Tables {
  std::vector<int32_t> offsets;
  std::vector<float> coefficients;

  Tables(const OptimizerCase& optimizer, int64_t rows)
      : offsets{0, static_cast<int32_t>(rows / 3), static_cast<int32_t>(rows / 3),
                static_cast<int32_t>(rows - rows / 4), static_cast<int32_t>(rows)},
        coefficients(4 * rec_sdk::kCoefficients) {
    for (int64_t t = 0; t < 4; ++t) {
      float* of_table = &coefficients[t * rec_sdk::kCoefficients];
      of_table[0] = t == 3 ? 0.5f : std::numeric_limits<float>::infinity();
      std::copy(optimizer.coefficients.begin(), optimizer.coefficients.end(), of_table + 1);
      of_table[1] *= 1.0f + 0.5f * static_cast<float>(t);
    }
  }
};

inline std::vector<int64_t> states_of(const OptimizerCase& optimizer, int64_t dim) {
  std::vector<int64_t> states;
  for (const int64_t elements : optimizer.states) states.push_back(elements > 0 ? elements : dim);
  return states;
}

// Runs a kernel at once on the emulated cores.
struct AtOnce {
  std::string title;

  template <class Body>
  void operator()(const char* name, int64_t blocks, const rec_sdk::emulator::Buffers& buffers,
                  const Body& body) const {
    run(title + ": " + name, blocks, buffers, body);
  }
};

// What the kernels find there must not matter.
inline std::vector<uint8_t> workspace_for(const Batch& batch) {
  return std::vector<uint8_t>(
      static_cast<size_t>(rec_sdk::ascendc::workspace_bytes(batch.lookups(), batch.dim)), 0xA5);
}

inline std::vector<uint8_t> updated_on_cpu(const rec_sdk::UpdateRows& a, const char* optimizer,
                                           const kernel_tests::Cache& before) {
  std::vector<uint8_t> bytes = before.bytes;
  rec_sdk::UpdateRows copy = a;
  copy.cache = bytes.data();
  std::vector<float> scratch(static_cast<size_t>(a.segments.dim));
  rec_sdk::cpu_kernels().update_rows(optimizer)(copy, 0, a.segments.rows, scratch.data());
  return bytes;
}

// The same update by both.
template <class Check>
void check_update(const Batch& batch, const kernel_tests::Cache& cache, const OptimizerCase& optimizer,
                  const std::string& title, const std::vector<int64_t>& core_counts, const Check& check) {
  const Tables tables(optimizer, batch.rows());
  rec_sdk::UpdateRows a{batch.segments(),           nullptr,    cache.layout, tables.offsets.data(), 4,
                        tables.coefficients.data(), cache.slots};
  const std::vector<uint8_t> expected = updated_on_cpu(a, optimizer.name, cache);
  for (const int64_t cores : core_counts) {
    std::vector<uint8_t> found = cache.bytes, workspace = workspace_for(batch);
    a.cache = found.data();
    rec_sdk::emulator::run_update_rows(AtOnce{title}, a, optimizer.name, workspace.data(), cores);
    check(title, cores, found, expected);
  }
}

inline void check_accumulate(const Batch& batch, Random* random, const std::string& title,
                             const std::vector<int64_t>& core_counts) {
  const std::vector<float> before = kernel_tests::random_floats(random, batch.slots * 2 * batch.dim);
  std::vector<float> expected = before, scratch(static_cast<size_t>(batch.dim));
  rec_sdk::AccumulateRows a{batch.segments(), expected.data(), batch.slots};
  rec_sdk::cpu_kernels().accumulate_rows(a, 0, batch.rows(), scratch.data());
  for (const int64_t cores : core_counts) {
    std::vector<float> found = before;
    std::vector<uint8_t> workspace = workspace_for(batch);
    a.pending = found.data();
    rec_sdk::emulator::run_accumulate_rows(AtOnce{title}, a, workspace.data(), cores);
    check_bits(title, cores, found, expected);
  }
}

}  // namespace ascendc_tests
