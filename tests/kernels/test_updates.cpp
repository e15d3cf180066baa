// Every optimizer's update of the CPU kernels against its formula in double, and its bits on every
// instruction set, with hot rows whole and in chunks.
#include <limits>

#include "tests/kernels/gradients.h"
#include "tests/kernels/split_gradients.h"
#include "tests/kernels/update_batch.h"

using kernel_tests::Cache;
using kernel_tests::Checksum;
using kernel_tests::CpuKernels;
using kernel_tests::Gradients;
using kernel_tests::in_ranges;
using kernel_tests::Random;
using kernel_tests::same_bits;
using kernel_tests::SplitGradients;
using kernel_tests::States;
using rec_sdk::DType;

namespace {

// One row in double.
struct Row {
  std::vector<double> weights;
  std::vector<std::vector<double>> states;
};

using Step = void (*)(const float* coefficients, const std::vector<double>& g, Row* row);

void sgd(const float* c, const std::vector<double>& g, Row* row) {
  for (size_t k = 0; k < g.size(); ++k) row->weights[k] -= c[1] * g[k];
}

void adagrad(const float* c, const std::vector<double>& g, Row* row) {
  for (size_t k = 0; k < g.size(); ++k) {
    row->states[0][k] += g[k] * g[k];
    row->weights[k] -= c[1] * g[k] / (std::sqrt(row->states[0][k]) + c[2]);
  }
}

void rowwise_adagrad(const float* c, const std::vector<double>& g, Row* row) {
  double squares = 0;
  for (const double element : g) squares += element * element;
  row->states[0][0] += squares / static_cast<double>(g.size());
  const double rate = c[1] / (std::sqrt(row->states[0][0]) + c[2]);
  for (size_t k = 0; k < g.size(); ++k) row->weights[k] -= rate * g[k];
}

void decayed_rowwise_adagrad(const float* c, const std::vector<double>& g, Row* row) {
  double squares = 0;
  for (size_t k = 0; k < g.size(); ++k) squares += std::pow(g[k] + c[3] * row->weights[k], 2);
  row->states[0][0] += squares / static_cast<double>(g.size());
  const double rate = c[1] / (std::sqrt(row->states[0][0]) + c[2]);
  for (size_t k = 0; k < g.size(); ++k) {
    row->weights[k] -= rate * (g[k] + c[3] * row->weights[k]) + c[4] * row->weights[k];
  }
}

double length_of(const std::vector<double>& values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

double ratio_of(const std::vector<double>& weights, const std::vector<double>& step) {
  return length_of(step) > 0 ? length_of(weights) / length_of(step) : 0;
}

void bounded_rowwise_adagrad(const float* c, const std::vector<double>& g, Row* row) {
  decayed_rowwise_adagrad(c, g, row);
  const double length = length_of(row->weights);
  for (double& weight : row->weights) weight *= length > c[5] ? c[5] / length : 1;
}

void ensemble_rowwise_adagrad(const float* c, const std::vector<double>& g, Row* row) {
  std::swap(row->states[0], row->states[1]);
  bounded_rowwise_adagrad(c, g, row);
  std::swap(row->states[0], row->states[1]);
}

// 1 without a last update, which is 0 then, else iter - last; states here are no whole numbers, so also
// between.
double steps_since(double last, double iter) { return 1 + std::min(last, 1.0) * (iter - 1 - last); }

void globally_decayed_rowwise_adagrad(const float* c, const std::vector<double>& g, Row* row) {
  const double missed = steps_since(row->states[1][0], c[6]) - 1;
  for (double& weight : row->weights) weight *= std::max<double>(std::exp(missed * c[4]), c[5]);
  row->states[1][0] = c[6];
  const float decay[] = {c[0], c[1], c[2], 0.0f, c[3]};
  decayed_rowwise_adagrad(decay, g, row);
}

void cowclip_rowwise_adagrad(const float* c, const std::vector<double>& g, Row* row) {
  std::vector<double> decayed = g;
  for (size_t k = 0; k < g.size(); ++k) decayed[k] += c[3] * row->weights[k];
  double& sum = row->states[0][0];
  double& count = row->states[2][0];
  sum += std::pow(length_of(decayed), 2) / static_cast<double>(g.size());
  count = 1 + count * std::exp(steps_since(row->states[1][0], c[8]) * c[5]);
  row->states[1][0] = c[8];
  const double bound = count * std::max<double>(c[6] * length_of(row->weights), c[7]);
  const double clip = length_of(decayed) > bound ? bound / length_of(decayed) : 1;
  const double rate = clip * c[1] / (std::sqrt(sum) + c[2]);
  for (size_t k = 0; k < g.size(); ++k) row->weights[k] -= rate * decayed[k] + c[4] * row->weights[k];
}

void counted_rowwise_adagrad(const float* c, const std::vector<double>& g, Row* row) {
  std::vector<double> decayed = g;
  for (size_t k = 0; k < g.size(); ++k) decayed[k] += c[3] * row->weights[k];
  double &sum = row->states[0][0], &count = row->states[2][0];
  sum += std::pow(length_of(decayed), 2) / static_cast<double>(g.size());
  count = 1 + count * std::exp(steps_since(row->states[1][0], c[12]) * c[6]);
  row->states[1][0] = c[12];
  const double plain = c[1] / (std::sqrt(sum) + c[2]);
  double rate = plain;
  if (count > c[9]) {
    const double factor = std::pow(std::max(c[8] / (count + 1), 1.0), c[7]);
    const double counted = c[10] == 1 ? c[11] * count : sum;
    rate = std::clamp(factor, 0.1, 10.0) * c[1] / (std::sqrt(counted) + c[2]);
  }
  const double kept = 1 - (c[4] * plain + c[5]) / count;
  for (size_t k = 0; k < g.size(); ++k) row->weights[k] = kept * row->weights[k] - rate * g[k];
}

void counted_adagradw(const float* c, const std::vector<double>& g, Row* row) {
  double &sum = row->states[0][0], &count = row->states[2][0];
  sum += std::pow(length_of(g), 2) / static_cast<double>(g.size());
  const double steps = steps_since(row->states[1][0], c[10]);
  const double missed = std::exp(c[4] * (std::min<double>(steps, c[5]) - 1));
  count = 1 + count * std::exp(steps * c[6]);
  row->states[1][0] = c[10];
  const double grown = 1 - c[7] - c[8] + c[7] * std::sqrt(count) + c[8] * count;
  const double rate = missed * std::min<double>(c[1] * grown, c[9]) / (std::sqrt(sum) + c[2]);
  const double kept = missed * (1 - c[3]);
  for (size_t k = 0; k < g.size(); ++k) row->weights[k] = kept * row->weights[k] - rate * g[k];
}

// Moving averages of a gradient and of a square.
void move_first(const float* c, double g, double* average) { *average = c[3] * *average + c[4] * g; }
void move_second(const float* c, double square, double* average) {
  *average = c[5] * *average + c[6] * square;
}

void lamb(const float* c, const std::vector<double>& g, Row* row) {
  std::vector<double> step(g.size());
  for (size_t k = 0; k < g.size(); ++k) {
    double& average = row->states[0][k];
    double& square = row->states[1][k];
    move_first(c, g[k], &average);
    move_second(c, g[k] * g[k], &square);
    step[k] = average * c[7] / (std::sqrt(square) * c[8] + c[2]) + c[9] * row->weights[k];
  }
  const double rate = c[1] * ratio_of(row->weights, step);
  for (size_t k = 0; k < g.size(); ++k) row->weights[k] -= rate * step[k];
}

// The two optimizers with one exp_avg_sq a row; the step without a rate or decay.
std::vector<double> partial_rowwise_step(const float* c, const std::vector<double>& g, Row* row) {
  double& square = row->states[1][0];
  move_second(c, std::pow(length_of(g), 2) / static_cast<double>(g.size()), &square);
  std::vector<double> step(g.size());
  for (size_t k = 0; k < g.size(); ++k) {
    double& average = row->states[0][k];
    move_first(c, g[k], &average);
    step[k] = average * c[7] / (std::sqrt(square) * c[8] + c[2]);
  }
  return step;
}

void partial_rowwise_adam(const float* c, const std::vector<double>& g, Row* row) {
  const std::vector<double> step = partial_rowwise_step(c, g, row);
  for (size_t k = 0; k < g.size(); ++k) row->weights[k] -= c[1] * step[k] + c[9] * row->weights[k];
}

void partial_rowwise_lamb(const float* c, const std::vector<double>& g, Row* row) {
  std::vector<double> step = partial_rowwise_step(c, g, row);
  for (size_t k = 0; k < g.size(); ++k) step[k] += c[9] * row->weights[k];
  const double rate = c[1] * ratio_of(row->weights, step);
  for (size_t k = 0; k < g.size(); ++k) row->weights[k] -= rate * step[k];
}

void lars_sgd(const float* c, const std::vector<double>& g, Row* row) {
  const double length = length_of(row->weights), below = length_of(g) + c[3] * length;
  const double rate = below > 0 ? c[1] * length / below : 0;
  for (size_t k = 0; k < g.size(); ++k) {
    double& momentum = row->states[0][k];
    momentum = c[2] * momentum + rate * (g[k] + c[3] * row->weights[k]);
    row->weights[k] -= momentum;
  }
}

void adam(const float* c, const std::vector<double>& g, Row* row) {
  for (size_t k = 0; k < g.size(); ++k) {
    double& average = row->states[0][k];
    double& square = row->states[1][k];
    move_first(c, g[k], &average);
    move_second(c, g[k] * g[k], &square);
    row->weights[k] -= c[1] * average / (std::sqrt(square) * c[7] + c[2]);
  }
}

void adamw(const float* c, const std::vector<double>& g, Row* row) {
  for (double& weight : row->weights) weight *= 1 - c[8];
  adam(c, g, row);
}

// In the order of kOptimizers.
constexpr Step kSteps[] = {sgd,
                           adagrad,
                           rowwise_adagrad,
                           decayed_rowwise_adagrad,
                           bounded_rowwise_adagrad,
                           ensemble_rowwise_adagrad,
                           globally_decayed_rowwise_adagrad,
                           cowclip_rowwise_adagrad,
                           counted_rowwise_adagrad,
                           counted_adagradw,
                           adam,
                           adamw,
                           partial_rowwise_adam,
                           lamb,
                           partial_rowwise_lamb,
                           lars_sgd};
static_assert(std::size(kSteps) == std::size(kernel_tests::kOptimizers), "every optimizer has its formula");

struct Optimizer : kernel_tests::OptimizerCase {
  Step step;
};

constexpr int32_t kTableOffsets[] = {0, 5, 5, 12};  // one table without rows

// Three tables, the last with clipping; each learns at another rate.
std::vector<float> coefficients_of(const Optimizer& optimizer) {
  std::vector<float> all(3 * rec_sdk::kCoefficients);
  for (int64_t table = 0; table < 3; ++table) {
    float* row = &all[table * rec_sdk::kCoefficients];
    row[0] = table == 2 ? 0.75f : std::numeric_limits<float>::infinity();
    std::copy(optimizer.coefficients.begin(), optimizer.coefficients.end(), row + 1);
    row[1] *= 1.0f + 0.5f * static_cast<float>(table);
  }
  return all;
}

// The row after one step with its gradient moved by `shift` error bounds.
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

void check_cache(const Optimizer& optimizer, const std::vector<float>& coefficients,
                 const Gradients& gradients, const Cache& before, const Cache& after) {
  std::vector<bool> updated(Gradients::kSlots);
  for (int64_t u = 0; u < gradients.rows(); ++u) {
    const int64_t table = u < kTableOffsets[1] ? 0 : 2;
    const int32_t slot = gradients.unique_slots[u];
    check_row(optimizer, &coefficients[table * rec_sdk::kCoefficients], before, after, slot,
              gradients.sums(u));
    updated[slot] = true;
  }
  for (int64_t slot = 0; slot < Gradients::kSlots; ++slot) {
    const auto bytes = static_cast<size_t>(before.layout.bytes);
    CHECK(updated[slot] || std::memcmp(before.record(slot), after.record(slot), bytes) == 0);
  }
}

Cache updated(const CpuKernels& kernels, const Optimizer& optimizer, const std::vector<float>& coefficients,
              const rec_sdk::Segments& segments, Cache cache) {
  const rec_sdk::UpdateRows arguments{segments, cache.bytes.data(),  cache.layout,     kTableOffsets,
                                      3,        coefficients.data(), Gradients::kSlots};
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
  const Cache before(&random, Gradients::kSlots, dim, dtype, kernel_tests::states_of(optimizer, dim), states);
  const std::vector<float> coefficients = coefficients_of(optimizer);
  const std::string name = std::string(optimizer.name) + (scaled ? " scaled" : "") +
                           (states == States::kMixed ? " mixed states" : "") + " dim " + std::to_string(dim) +
                           " " + kernel_tests::name_of(dtype);
  const SplitGradients in_several(&random, gradients.lookups(), 3 + dim % 5);
  bool checked = false;
  same_bits(name, [&](const CpuKernels& kernels, Checksum* checksum) {
    gradients.sum_chunks(kernels);
    const auto after_update = [&](const rec_sdk::Segments& segments) {
      return updated(kernels, optimizer, coefficients, segments, before);
    };
    const Cache after = after_update(gradients.segments(true));
    CHECK(after.bytes == after_update(gradients.segments(false)).bytes);
    rec_sdk::Segments several = gradients.segments(false);
    several.lookups = in_several.lookups(several.lookups);
    CHECK(after.bytes == after_update(several).bytes);
    if (!checked) check_cache(optimizer, coefficients, gradients, before, after);
    checked = true;  // the others must give the same bits
    checksum->add(after.bytes);
  });
}

}  // namespace

int main() {
  CHECK(rec_sdk::cpu_kernels().update_rows("none such") == nullptr);
  for (size_t i = 0; i < std::size(kSteps); ++i) {
    const Optimizer optimizer{kernel_tests::kOptimizers[i], kSteps[i]};
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
