// Tests optimizers with other numbers of states than real optimizers have. Results are compared with the same
// formula computed on single floats.
#include "op_kernels/common/aggregate.h"
#include "tests/ascendc_kernels/update_batch.h"

using ascendc_tests::Batch;
using kernel_tests::Cache;
using kernel_tests::Random;
using rec_sdk::DType;
using rec_sdk::ascendc::RowsToUpdate;

namespace {

using rec_sdk::Numbers;
using rec_sdk::REC_SDK_ISA::NoValues;
using rec_sdk::REC_SDK_ISA::Pass;

// An optimizer with any number of element states and row states, and with one or two passes; the second pass
// reads the results of the first.
template <int kElement, int kRow, int kPasses>
struct Mixed {
  static constexpr int kElementStates = kElement, kRowStates = kRow;
  static constexpr int kMeasures = kPasses, kSums = 2, kValues = 2;
  static constexpr bool kMeasuresRecord = kPasses > 1;

  float lr;
  explicit constexpr Mixed(const float* c) : lr(c[1]) {}

  template <class T>
  constexpr void advance(T* states, const T& g) const {
    for (int s = 0; s < kElement; ++s) states[s] += g * 0.5f;
  }
  template <class T>
  constexpr Numbers<T, 1> measure(Pass<0>, const T&, const T*, const T& g, NoValues) const {
    return {{g * g}};
  }
  template <class T>
  constexpr Numbers<T, 2> begin_row(Pass<0>, T* row_states, const Numbers<T, 1>& sums, float dim,
                                    NoValues) const {
    for (int s = 0; s < kRow; ++s) row_states[s] += sums.each[0] / dim + 0.5f;
    if constexpr (kRow > 1) row_states[0] *= row_states[1];
    if constexpr (kRow > 0) return {{lr / (1.0f + row_states[0]), sums.each[0] * 0.125f}};
    return {{sums.each[0] * lr, sums.each[0] + 1.0f}};
  }
  template <class T>
  constexpr Numbers<T, 2> measure(Pass<1>, const T& w, const T* states, const T& g,
                                  const Numbers<T, 2>& values) const {
    if constexpr (kElement > 0) return {{w * states[0], g * values.each[0]}};
    return {{w * g, g * values.each[0]}};
  }
  template <class T>
  constexpr Numbers<T, 1> begin_row(Pass<1>, T* row_states, const Numbers<T, 2>& sums, float dim,
                                    const Numbers<T, 2>& values) const {
    if constexpr (kRow > 0) row_states[kRow - 1] += sums.each[1];
    return {{values.each[1] * sums.each[0] / dim + sums.each[1]}};
  }
  template <class T, int kCount>
  constexpr void element(T& w, T* states, const T& g, const Numbers<T, kCount>& values) const {
    for (int s = 0; s < kElement; ++s) states[s] += g * w;
    w -= values.each[kCount - 1] * g;
  }
};

// A row of a cache, by its gradient and its record.
struct Row {
  const float* g;
  float max_gradient;
  float* record;
  int64_t dim;

  template <class Optimizer>
  std::vector<float> advanced(const Optimizer& optimizer, int64_t k) const {
    std::vector<float> states(Optimizer::kElementStates + 1);
    for (int s = 0; s < Optimizer::kElementStates; ++s) states[s] = record[dim * (1 + s) + k];
    optimizer.advance(states.data(), clipped(k));
    return states;
  }
  float clipped(int64_t k) const { return rec_sdk::REC_SDK_ISA::clip(g[k], max_gradient); }
};

template <int kPass, class Optimizer, class Values>
void update_row(const Optimizer& optimizer, const Row& row, const Values& values) {
  if constexpr (kPass == Optimizer::kMeasures) {
    for (int64_t k = 0; k < row.dim; ++k) {
      std::vector<float> states = row.advanced(optimizer, k);
      optimizer.element(row.record[k], states.data(), row.clipped(k), values);
      for (int s = 0; s < Optimizer::kElementStates; ++s) row.record[row.dim * (1 + s) + k] = states[s];
    }
  } else {
    constexpr Pass<kPass> kThis{};
    const auto sums = rec_sdk::REC_SDK_ISA::lane_sums(row.dim, [&](int64_t k) {
      const std::vector<float> states = row.advanced(optimizer, k);
      return optimizer.measure(kThis, row.record[k], states.data(), row.clipped(k), values);
    });
    float* row_states = row.record + row.dim * (1 + Optimizer::kElementStates);
    update_row<kPass + 1>(optimizer, row,
                          optimizer.begin_row(kThis, row_states, sums, static_cast<float>(row.dim), values));
  }
}

template <class Optimizer>
void check(int64_t dim) {
  constexpr int kElement = Optimizer::kElementStates, kRow = Optimizer::kRowStates;
  Random random(dim);
  const Batch batch(&random, dim, std::vector<int32_t>(50, 1), false);
  std::vector<int64_t> states(kElement, dim);
  states.insert(states.end(), kRow, 1);
  const Cache before(&random, batch.slots, dim, DType::kFloat32, states);
  const float coefficients[rec_sdk::kCoefficients] = {0.5f, 0.1f};
  const int32_t table_offsets[] = {0, 50};

  Cache expected = before, found = before;
  for (int64_t u = 0; u < batch.rows(); ++u) {
    const float* g = &batch.grad[batch.grad_row[u] * batch.stride];
    const Row row{g, coefficients[0], reinterpret_cast<float*>(expected.record(batch.unique_slots[u])), dim};
    update_row<0>(Optimizer(coefficients), row, NoValues{});
  }
  const rec_sdk::UpdateRows a{batch.segments(), found.bytes.data(), found.layout, table_offsets, 1,
                              coefficients,     found.slots};
  const auto launch = [](const char* name, int64_t cores, const rec_sdk::emulator::Buffers& buffers,
                         const auto& body) { ascendc_tests::run(name, cores, buffers, body); };
  const rec_sdk::emulator::GradientList one;  // the only gradient needs no list
  const rec_sdk::emulator::UpdateLauncher<decltype(launch)> launcher{launch, a, one, {}, 7};
  launcher.template launch<Optimizer, rec_sdk::ascendc::FloatWeights>();
  const std::string title =
      "states " + std::to_string(kElement) + " + " + std::to_string(kRow) + " dim " + std::to_string(dim);
  ascendc_tests::check_bits(title, 7, found.bytes, expected.bytes);
}

}  // namespace

int main() {
  for (const int64_t dim : {3, 64, 2500}) {
    check<Mixed<0, 2, 1>>(dim);
    check<Mixed<1, 1, 1>>(dim);
    check<Mixed<2, 2, 2>>(dim);
    check<Mixed<3, 1, 2>>(dim);
    check<Mixed<1, 0, 1>>(dim);
    check<Mixed<0, 0, 2>>(dim);
  }
  return check_result();
}
