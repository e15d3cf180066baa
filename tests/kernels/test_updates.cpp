// Compares every optimizer's update by the CPU kernels with its formula in double, and checks that results
// are bit-identical on every instruction set, and whether hot rows are summed whole or in chunks.
#include "tests/kernels/gradients.h"
#include "tests/kernels/real.h"

using kernel_tests::Cache;
using kernel_tests::Checksum;
using kernel_tests::CpuKernels;
using kernel_tests::Gradients;
using kernel_tests::in_ranges;
using kernel_tests::Random;
using kernel_tests::Real;
using kernel_tests::same_bits;
using kernel_tests::States;
using kernel_tests::Tables;
using rec_sdk::DType;

namespace {

using rec_sdk::Numbers;
using rec_sdk::REC_SDK_ISA::NoValues;
using rec_sdk::REC_SDK_ISA::Pass;

// The weights and states of one row in double.
struct Row {
  std::vector<double> weights;
  std::vector<std::vector<double>> states;
};

using Step = void (*)(const float* coefficients, const std::vector<double>& g, Row* row);

// A row that is updated by an optimizer's own formula, computed in double. The test thus checks the kernel
// around the formula; tests in Python compare the formulas with torch's classes.
template <class Optimizer>
class Updated {
 public:
  Updated(const float* c, const std::vector<double>& g, const Row& row) : optimizer_(c) {
    for (size_t k = 0; k < g.size(); ++k) {
      Element& each = elements_.emplace_back();
      each.w = {row.weights[k]};
      each.g = {g[k]};
      for (int s = 0; s < kElement; ++s) each.states[s] = {row.states[s][k]};
      optimizer_.advance(each.states, each.g);
    }
    for (int s = 0; s < kRow; ++s) row_states_[s] = {row.states[kElement + s][0]};
    from_pass<0>(NoValues{});
  }

  Row row() const {
    Row updated;
    updated.states.resize(kElement + kRow);
    for (const Element& each : elements_) {
      updated.weights.push_back(each.w.value);
      for (int s = 0; s < kElement; ++s) updated.states[s].push_back(each.states[s].value);
    }
    for (int s = 0; s < kRow; ++s) updated.states[kElement + s].push_back(row_states_[s].value);
    return updated;
  }

 private:
  static constexpr int kElement = Optimizer::kElementStates, kRow = Optimizer::kRowStates;
  struct Element {
    Real w, g, states[kElement + 1];
  };

  template <int kPass, class Values>
  void from_pass(const Values& before) {
    if constexpr (kPass == Optimizer::kMeasures) {
      for (Element& each : elements_) optimizer_.element(each.w, each.states, each.g, before);
    } else {
      constexpr Pass<kPass> kThis{};
      auto sums = optimizer_.measure(kThis, elements_[0].w, elements_[0].states, elements_[0].g, before);
      for (size_t k = 1; k < elements_.size(); ++k) {
        const Element& each = elements_[k];
        const auto terms = optimizer_.measure(kThis, each.w, each.states, each.g, before);
        for (int n = 0; n < terms.kCount; ++n) sums.each[n] += terms.each[n];
      }
      const auto dim = static_cast<float>(elements_.size());
      from_pass<kPass + 1>(optimizer_.begin_row(kThis, row_states_, sums, dim, before));
    }
  }

  const Optimizer optimizer_;
  std::vector<Element> elements_;
  Real row_states_[kRow + 1];
};

template <class Optimizer>
void step_of(const float* c, const std::vector<double>& g, Row* row) {
  *row = Updated<Optimizer>(c, g, *row).row();
}

template <class... Optimizer>
std::vector<Step> steps_of(rec_sdk::REC_SDK_ISA::OptimizerList<Optimizer...>) {
  return {step_of<Optimizer>...};
}

struct Optimizer : kernel_tests::OptimizerCase {
  Step step;
};

// Returns the row after one step whose gradient is changed by `shift` times its error bound.
Row stepped(const Optimizer& optimizer, const float* c, const Cache& before, int64_t slot,
            const std::vector<Gradients::Sum>& sums, double shift) {
  Row row;
  std::vector<double> g;
  for (size_t k = 0; k < sums.size(); ++k) {
    const double limit = c[0];
    g.push_back(std::clamp(sums[k].value + shift * sums[k].error, -limit, limit));
    row.weights.push_back(before.weight(slot, static_cast<int64_t>(k)));
  }
  for (int64_t s = 0; s < before.layout.state_count; ++s) {
    row.states.emplace_back();
    for (int64_t k = 0; k < before.layout.state_elements[s]; ++k) {
      row.states.back().push_back(before.state(slot, s, k));
    }
  }
  optimizer.step(c, g, &row);
  return row;
}

void check_near(double found, double expected, double low, double high, double rounding) {
  const double spread = std::fabs(low - expected) + std::fabs(high - expected);
  CHECK(std::fabs(found - expected) <=
        spread + 2e-6 * (1 + std::fabs(expected)) + rounding * std::fabs(expected));
}

double rounding_of(DType dtype) {
  return dtype == DType::kFloat32 ? 0 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
}

void check_row(const Optimizer& optimizer, const float* c, const Cache& before, const Cache& after,
               int64_t slot, const std::vector<Gradients::Sum>& sums) {
  const double rounding = rounding_of(before.layout.weight_dtype);
  const Row expected = stepped(optimizer, c, before, slot, sums, 0);
  const Row low = stepped(optimizer, c, before, slot, sums, -1);
  const Row high = stepped(optimizer, c, before, slot, sums, 1);
  for (size_t k = 0; k < sums.size(); ++k) {
    check_near(after.weight(slot, static_cast<int64_t>(k)), expected.weights[k], low.weights[k],
               high.weights[k], rounding);
  }
  for (size_t s = 0; s < expected.states.size(); ++s) {
    for (size_t k = 0; k < expected.states[s].size(); ++k) {
      check_near(after.state(slot, static_cast<int64_t>(s), static_cast<int64_t>(k)), expected.states[s][k],
                 low.states[s][k], high.states[s][k], rounding_of(before.layout.state_dtype[s]));
    }
  }
}

void check_cache(const Optimizer& optimizer, const Tables& tables, const Gradients& gradients,
                 const Cache& before, const Cache& after) {
  std::vector<bool> updated(static_cast<size_t>(gradients.slots));
  int64_t table = 0;
  for (int64_t u = 0; u < gradients.rows(); ++u) {
    while (tables.offsets[table + 1] <= u) ++table;
    const int32_t slot = gradients.unique_slots[u];
    check_row(optimizer, &tables.coefficients[table * rec_sdk::kCoefficients], before, after, slot,
              gradients.sums(u));
    updated[slot] = true;
  }
  for (int64_t slot = 0; slot < gradients.slots; ++slot) {
    const auto bytes = static_cast<size_t>(before.layout.bytes);
    CHECK(updated[slot] || std::memcmp(before.record(slot), after.record(slot), bytes) == 0);
  }
}

Cache updated(const CpuKernels& kernels, const Optimizer& optimizer, const Tables& tables,
              const Gradients& gradients, const rec_sdk::Segments& segments, Cache cache) {
  rec_sdk::UpdateRows arguments = kernel_tests::update_arguments(gradients, tables, cache, &cache.bytes);
  arguments.segments = segments;
  std::vector<float> scratch(static_cast<size_t>(cache.layout.dim));
  const auto kernel = kernels.update_rows(optimizer.name);
  in_ranges(segments.rows,
            [&](int64_t begin, int64_t end) { kernel(arguments, begin, end, scratch.data()); });
  return cache;
}

void update(const Optimizer& optimizer, int64_t dim, DType dtype, bool scaled,
            States states = States::kFloats) {
  Random random(dim);
  Gradients gradients(&random, dim, scaled);
  const Cache before(&random, gradients.slots, dim, dtype, kernel_tests::states_of(optimizer, dim), states);
  const Tables tables(optimizer, gradients.rows());
  const std::string name = kernel_tests::title_of(optimizer.name, dim, dtype,
                                                  scaled                     ? "scaled"
                                                  : states == States::kMixed ? "mixed states"
                                                                             : "");
  gradients.split_gradient(&random, 3 + dim % 5);
  bool checked = false;
  same_bits(name, [&](const CpuKernels& kernels, Checksum* checksum) {
    gradients.sum_chunks(kernels);
    const auto after_update = [&](const rec_sdk::Segments& segments) {
      return updated(kernels, optimizer, tables, gradients, segments, before);
    };
    const Cache after = after_update(gradients.in_chunks());
    CHECK(after.bytes == after_update(gradients.joined()).bytes);
    CHECK(after.bytes == after_update(gradients.segments()).bytes);
    if (!checked) check_cache(optimizer, tables, gradients, before, after);
    checked = true;  // once is enough: other instruction sets must give the same bits
    checksum->add(after.bytes);
  });
}

}  // namespace

int main() {
  CHECK(rec_sdk::cpu_kernels().update_rows("none such") == nullptr);
  const std::vector<Step> steps = steps_of(rec_sdk::REC_SDK_ISA::Optimizers{});
  for (size_t i = 0; i < steps.size(); ++i) {
    const Optimizer optimizer{kernel_tests::kOptimizers[i], steps[i]};
    for (const int64_t dim : kernel_tests::kDims) {
      for (const DType dtype : kernel_tests::kDTypes) {
        update(optimizer, dim, dtype, false);
        update(optimizer, dim, dtype, true);
        if (!optimizer.states.empty()) update(optimizer, dim, dtype, false, States::kMixed);
      }
    }
  }
  return check_result();
}
