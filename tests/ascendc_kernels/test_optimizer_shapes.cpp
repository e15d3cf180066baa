// Optimizers with numbers of states that no optimizer of the list has, against the same formula on floats.
#include "op_kernels/common/aggregate.h"
#include "tests/ascendc_kernels/update_batch.h"

using ascendc_tests::Batch;
using kernel_tests::Cache;
using kernel_tests::Random;
using rec_sdk::DType;
using rec_sdk::ascendc::RowsToUpdate;

namespace {

// Row states after element states.
template <int kElement, int kRow, bool kMean>
struct Mixed {
  static constexpr int kElementStates = kElement, kRowStates = kRow;
  static constexpr bool kMeanSquare = kMean;

  float lr;
  explicit constexpr Mixed(const float* c) : lr(c[1]) {}

  template <class T>
  constexpr T begin_row(T* row_states, const T& mean_square) const {
    for (int s = 0; s < kRow; ++s) row_states[s] += mean_square + 0.5f;
    if constexpr (kRow > 1) row_states[0] *= row_states[1];
    if constexpr (kRow > 0) return lr / (1.0f + row_states[0]);
    return mean_square * lr;
  }
  template <class T>
  constexpr void element(T& w, T* states, const T& g, const T& row) const {
    for (int s = 0; s < kElement; ++s) states[s] += g * w;
    w -= row * g;
  }
};

// Every row has one lookup.
template <class Optimizer>
void update_row(const float* g, const float* coefficients, Cache* cache, int64_t slot) {
  const Optimizer optimizer(coefficients);
  const int64_t dim = cache->layout.dim;
  auto* record = reinterpret_cast<float*>(cache->record(slot));
  float* row_states = record + dim * (1 + Optimizer::kElementStates);
  const auto clipped = [&](int64_t k) { return rec_sdk::REC_SDK_ISA::clip(g[k], coefficients[0]); };
  const float squares =
      rec_sdk::REC_SDK_ISA::lane_sum(dim, [&](int64_t k) { return clipped(k) * clipped(k); });
  const float mean = Optimizer::kMeanSquare ? squares / static_cast<float>(dim) : 0;
  const float row = optimizer.begin_row(row_states, mean);
  for (int64_t k = 0; k < dim; ++k) {
    float states[Optimizer::kElementStates + 1];
    for (int s = 0; s < Optimizer::kElementStates; ++s) states[s] = record[dim * (1 + s) + k];
    optimizer.element(record[k], states, clipped(k), row);
    for (int s = 0; s < Optimizer::kElementStates; ++s) record[dim * (1 + s) + k] = states[s];
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
    update_row<Optimizer>(g, coefficients, &expected, batch.unique_slots[u]);
  }
  const rec_sdk::UpdateRows a{batch.segments(), found.bytes.data(), found.layout, table_offsets, 1,
                              coefficients,     found.slots};
  const auto launch = [](const char* name, int64_t cores, const rec_sdk::emulator::Buffers& buffers,
                         const auto& body) { ascendc_tests::run(name, cores, buffers, body); };
  const rec_sdk::emulator::GradientList one;  // without a table
  const rec_sdk::emulator::UpdateLauncher<decltype(launch)> launcher{launch, a, one, {}, 7};
  launcher.template launch<Optimizer, rec_sdk::ascendc::FloatWeights>();
  const std::string title =
      "states " + std::to_string(kElement) + " + " + std::to_string(kRow) + " dim " + std::to_string(dim);
  ascendc_tests::check_bits(title, 7, found.bytes, expected.bytes);
}

}  // namespace

int main() {
  for (const int64_t dim : {3, 64, 2500}) {
    check<Mixed<0, 2, false>>(dim);
    check<Mixed<1, 1, true>>(dim);
    check<Mixed<2, 2, true>>(dim);
    check<Mixed<3, 1, false>>(dim);
    check<Mixed<1, 0, true>>(dim);
  }
  return check_result();
}
