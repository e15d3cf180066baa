// A batch of gradients for update_rows and accumulate_rows, the optimizers, and the results of the CPU
// kernels.
#pragma once

#include <limits>
#include <map>
#include <memory>
#include <sstream>

#include "op_kernels/common/optimizers.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/split_gradients.h"
#include "torch_npu_ext/engine/batch/hot_segments.h"

namespace kernel_tests {

struct UpdateBatch {
  int64_t dim, stride, slots, grad_rows;
  std::vector<float> grad, scale;
  std::vector<int32_t> unique_slots, offsets, grad_row, grad_column;
  std::vector<rec_sdk::HotSegment> hot_segments;
  std::shared_ptr<const SplitGradients> split;  // the gradient in several tensors; null if it is in one

  // lengths: number of lookups of each row. scaled: whether each lookup has a scale and a column, as lookups
  // of pooled tables have.
  UpdateBatch(Random* random, int64_t dim_, const std::vector<int32_t>& lengths, bool scaled,
              Spacing spacing = Spacing::kOdd)
      : dim(dim_),
        stride(dim_ + (spacing == Spacing::kOdd ? 9 : 12)),
        grad_rows(dim_ <= 8192 ? 500 : 20),
        offsets{0} {
    for (const int32_t length : lengths) offsets.push_back(offsets.back() + length);
    hot_segments = rec_sdk::hot_segments_of(offsets);
    slots = rows() + 5;
    unique_slots.resize(lengths.size());
    for (int64_t u = 0; u < rows(); ++u) unique_slots[u] = static_cast<int32_t>(u);
    for (int64_t u = 0; u < rows(); ++u) std::swap(unique_slots[u], unique_slots[random->below(rows())]);
    grad = random_floats(random, grad_rows * stride);
    for (int64_t j = 0; j < lookups(); ++j) grad_row.push_back(random->below(grad_rows));
    if (!scaled) return;
    scale = random_floats(random, lookups());
    const int32_t step = spacing == Spacing::kOdd ? 1 : 4;
    for (int64_t j = 0; j < lookups(); ++j)
      grad_column.push_back(random->below((stride - dim) / step) * step);
  }

  int64_t rows() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t lookups() const { return offsets.back(); }

  void split_gradient(Random* random, int64_t count) {
    split = std::make_shared<SplitGradients>(random, joined().lookups, count);
  }

  rec_sdk::Segments segments() const {
    rec_sdk::Segments all = joined();
    if (split != nullptr) all.lookups = split->lookups(all.lookups);
    return all;
  }

  // Returns the segments with the whole gradient in one tensor.
  rec_sdk::Segments joined() const {
    rec_sdk::Segments all{};
    all.lookups = {{grad.data(), stride, grad_rows, stride},
                   grad_row.data(),
                   grad_column.empty() ? nullptr : grad_column.data(),
                   scale.empty() ? nullptr : scale.data(),
                   lookups(),
                   nullptr,
                   nullptr,
                   0};
    all.dim = dim;
    all.unique_slots = unique_slots.data();
    all.offsets = offsets.data();
    all.rows = rows();
    all.hot_segments = hot_segments.data();
    all.hot_segment_count = static_cast<int64_t>(hot_segments.size());
    return all;
  }
};

// Returns the number of lookups of `rows` rows, none of them hot: 0, 1, a few, and several blocks, repeated.
inline std::vector<int32_t> short_rows(int64_t rows) {
  const std::vector<int32_t> pattern = {1, 0, 2, 1, 1, 31, 1, 33, 1, 1, 3, 100, 1, 0, 0, 1, 2};
  std::vector<int32_t> lengths;
  for (int64_t u = 0; u < rows; ++u) lengths.push_back(pattern[u % pattern.size()]);
  return lengths;
}

// Returns `lengths` with the lengths `hot` at equal distances; every third hot row is followed by another hot
// row.
inline std::vector<int32_t> with_hot_rows(std::vector<int32_t> lengths, const std::vector<int32_t>& hot) {
  const int64_t step = static_cast<int64_t>(lengths.size()) / static_cast<int64_t>(hot.size() + 1);
  for (size_t i = 0; i < hot.size(); ++i) {
    lengths[static_cast<size_t>(step) * (i + 1)] = hot[i];
    if (i % 3 == 2) lengths[static_cast<size_t>(step) * (i + 1) + 1] = 257;
  }
  return lengths;
}

struct OptimizerCase {
  const char* name;
  std::vector<int64_t> states;      // elements of each state; 0 means dim
  std::vector<float> coefficients;  // without coefficient 0, the gradient's bound
};

// Returns a value for a coefficient: 0.1 for the first one, which is a rate; for most others a fraction that
// depends on `place`; and a fixed value for names that do not denote fractions.
inline float coefficient_of(const std::string& name, size_t place) {
  static const std::map<std::string, float> kOthers = {{"eps", 1e-3f},
                                                       {"iter", 9},
                                                       {"max_counter", 9},
                                                       {"most_steps", 3},
                                                       {"tail", 1.25f},
                                                       {"counts", 1},
                                                       {"max_norm", 2},
                                                       {"power", -0.75f},
                                                       {"inv_bias_correction1", 1.5f},
                                                       {"inv_sqrt_bias_correction2", 1.25f}};
  if (place == 1) return 0.1f;
  const auto other = kOthers.find(name);
  if (other != kOthers.end()) return other->second;
  if (name.rfind("one_minus_", 0) == 0) return 1 - coefficient_of(name.substr(10), place - 1);
  if (name.rfind("log_", 0) == 0) return -0.125f;
  return 0.0625f * static_cast<float>(place);
}

template <class Optimizer>
OptimizerCase case_of() {
  OptimizerCase made{Optimizer::name(), {}, {}};
  made.states.assign(Optimizer::kElementStates, 0);
  made.states.resize(Optimizer::kElementStates + Optimizer::kRowStates, 1);
  std::istringstream names(Optimizer::coefficients());
  for (std::string name; names >> name;) {
    made.coefficients.push_back(coefficient_of(name, made.coefficients.size() + 1));
  }
  return made;
}

template <class... Optimizer>
std::vector<OptimizerCase> cases_of(rec_sdk::REC_SDK_ISA::OptimizerList<Optimizer...>) {
  return {case_of<Optimizer>()...};
}

inline const std::vector<OptimizerCase> kOptimizers = cases_of(rec_sdk::REC_SDK_ISA::Optimizers{});

inline std::vector<int64_t> states_of(const OptimizerCase& optimizer, int64_t dim) {
  std::vector<int64_t> states;
  for (const int64_t elements : optimizer.states) states.push_back(elements > 0 ? elements : dim);
  return states;
}

// Four tables with different learning rates. The second has no rows; only the last clips gradients.
// stochastic: whether there are seeds and row ids (unlike row numbers) for stochastic rounding.
struct Tables {
  std::vector<int32_t> offsets;
  std::vector<float> coefficients;
  std::vector<int64_t> row_ids, seeds;

  Tables(const OptimizerCase& optimizer, int64_t rows, bool stochastic = false)
      : offsets{0, static_cast<int32_t>(rows / 3), static_cast<int32_t>(rows / 3),
                static_cast<int32_t>(rows - rows / 4), static_cast<int32_t>(rows)},
        coefficients(4 * rec_sdk::kCoefficients) {
    for (int64_t t = 0; t < 4; ++t) {
      float* of_table = &coefficients[t * rec_sdk::kCoefficients];
      of_table[0] = t == 3 ? 0.5f : std::numeric_limits<float>::infinity();
      std::copy(optimizer.coefficients.begin(), optimizer.coefficients.end(), of_table + 1);
      of_table[1] *= 1.0f + 0.5f * static_cast<float>(t);
    }
    if (!stochastic) return;
    seeds = {0x123456789abcdef0, -1, 77, std::numeric_limits<int64_t>::min()};
    for (int64_t u = 0; u < rows + 1; ++u) row_ids.push_back((u - rows / 2) * 1'000'000'007);
  }
};

// Fills the padding between and after weights and states with 0xA5, to find kernels that write to it.
inline void fill_padding(Cache* cache) {
  const RecordLayout& layout = cache->layout;
  std::vector<bool> used(static_cast<size_t>(layout.bytes));
  const auto use = [&](int64_t first, int64_t bytes) { std::fill_n(used.begin() + first, bytes, true); };
  use(0, layout.weight_bytes);
  for (int64_t s = 0; s < layout.state_count; ++s) use(layout.state_offset[s], layout.state_bytes(s));
  for (size_t i = 0; i < cache->bytes.size(); ++i) {
    if (!used[i % used.size()]) cache->bytes[i] = 0xA5;
  }
}

// norms: memory for the gradient norms that the update writes; null if it writes none.
inline rec_sdk::UpdateRows update_arguments(const UpdateBatch& batch, const Tables& tables,
                                            const Cache& cache, std::vector<uint8_t>* bytes,
                                            std::vector<float>* norms = nullptr) {
  return {batch.segments(),
          bytes->data(),
          cache.layout,
          tables.offsets.data(),
          4,
          tables.coefficients.data(),
          cache.slots,
          tables.row_ids.empty() ? nullptr : tables.row_ids.data(),
          tables.seeds.data(),
          norms == nullptr ? nullptr : norms->data()};
}

inline std::vector<float> norms_for(const UpdateBatch& batch) {
  return std::vector<float>(static_cast<size_t>(2 * batch.rows()), -1.0f);
}

// Returns the values with every NaN replaced with the same NaN, because processors return different NaNs.
inline std::vector<float> with_one_nan(std::vector<float> values) {
  for (float& value : values) {
    if (value != value) value = std::numeric_limits<float>::quiet_NaN();
  }
  return values;
}

inline std::vector<uint8_t> updated_on_cpu(const UpdateBatch& batch, const Tables& tables,
                                           const char* optimizer, const Cache& before,
                                           std::vector<float>* norms = nullptr) {
  std::vector<uint8_t> bytes = before.bytes;
  std::vector<float> scratch(static_cast<size_t>(batch.dim));
  rec_sdk::UpdateRows arguments = update_arguments(batch, tables, before, &bytes, norms);
  arguments.segments = batch.joined();
  rec_sdk::cpu_kernels().update_rows(optimizer)(arguments, 0, batch.rows(), scratch.data());
  return bytes;
}

inline std::vector<float> accumulated_on_cpu(const UpdateBatch& batch, const std::vector<float>& before) {
  std::vector<float> pending = before, scratch(static_cast<size_t>(batch.dim));
  rec_sdk::cpu_kernels().accumulate_rows({batch.joined(), pending.data(), batch.slots}, 0, batch.rows(),
                                         scratch.data());
  return pending;
}

// Replaces some gradients with NaN, infinities, zeros, subnormal numbers, and numbers too large for 16 bits.
inline void add_special_values(Random* random, UpdateBatch* batch) {
  const float specials[] = {NAN,   INFINITY, -INFINITY, 1e-40f,    -3e-45f, 0.0f,
                            -0.0f, 70000.0f, 3e38f,     -65519.9f, 6e-8f};
  for (float& g : batch->grad) {
    if (random->below(20) == 0) g = specials[random->below(11)];
  }
}

// Replaces some 16-bit units of weights and states with random bits.
inline void add_special_values(Random* random, Cache* cache) {
  const int64_t values = static_cast<int64_t>(cache->bytes.size()) / 2;
  for (int64_t i = 0; i < values; ++i) {
    if (random->below(20) == 0) write(cache->bytes.data(), i, static_cast<uint16_t>(random->bits()));
  }
}

// Replaces every NaN with the same NaN: its sign and payload depend on the order of operands, which a
// compiler may change.
inline void unify_nans(DType dtype, int64_t elements, uint8_t* block) {
  for (int64_t i = 0; i < elements; ++i) {
    if (dtype == DType::kFloat32) {
      if (std::isnan(read<float>(block, i))) write<uint32_t>(block, i, 0xffffffff);
    } else if (std::isnan(value_of(read<uint16_t>(block, i), dtype))) {
      write<uint16_t>(block, i, 0xffff);
    }
  }
}

inline std::vector<uint8_t> without_nans(const RecordLayout& layout, std::vector<uint8_t> bytes) {
  for (uint8_t* record = bytes.data(); record < bytes.data() + bytes.size(); record += layout.bytes) {
    unify_nans(layout.weight_dtype, layout.dim, record);
    for (int64_t s = 0; s < layout.state_count; ++s) {
      unify_nans(layout.state_dtype[s], layout.state_elements[s], record + layout.state_offset[s]);
    }
  }
  return bytes;
}

}  // namespace kernel_tests
