// A table of weights, and a batch of bags whose lookups read the table.
#pragma once

#include "tests/kernels/backend.h"

namespace kernel_tests {

// A table with random weights, except that all weights of row 0 are -0: a sum of them must stay -0.
struct Table {
  static constexpr int64_t kSlots = 50;

  rec_sdk::Weights weights;
  std::vector<uint8_t> bytes;

  Table(Random* random, int64_t dim, DType dtype, Spacing spacing) {
    const int64_t value_bytes = rec_sdk::dtype_bytes(dtype);
    const Cache cache(random, kSlots, dim, dtype, {dim});
    const int64_t stride =
        spacing == Spacing::kRecords ? cache.layout.bytes : (dim + 1 + dim % 2 + 1) * value_bytes;
    bytes.resize(static_cast<size_t>((kSlots - 1) * stride + dim * value_bytes));
    for (int64_t s = 0; s < kSlots; ++s) {
      std::memcpy(bytes.data() + s * stride, cache.record(s), static_cast<size_t>(dim * value_bytes));
    }
    for (int64_t i = 0; i < dim * value_bytes; ++i) bytes[i] = (i + 1) % value_bytes == 0 ? 0x80 : 0;
    weights = {bytes.data(), stride, kSlots, dim, dtype};
  }

  double weight(int64_t slot, int64_t k) const {
    return element_of(bytes.data() + slot * weights.stride_bytes, k, weights.dtype);
  }
};

struct BagShape {
  const char* name;
  int64_t batch_size, first_bag;
  std::vector<int64_t> lengths;  // lookups of each bag
};

struct LookupBatch {
  int64_t dim, bag_count, features, columns, stride;
  Table table;
  std::vector<int64_t> offsets{0}, feature_columns;
  std::vector<uint8_t> means;
  std::vector<int32_t> slots;
  std::vector<float> sample_weights, grad;

  // Places the slices of the features in descending order, with gaps between them if spacing is kOdd. Every
  // second feature is pooled by mean.
  LookupBatch(Random* random, int64_t dim_, DType dtype, const BagShape& shape, Spacing spacing)
      : dim(dim_),
        table(random, dim_, dtype, spacing),
        batch_size_(shape.batch_size),
        first_bag_(shape.first_bag) {
    const int64_t gap = spacing == Spacing::kOdd ? 1 : 0;
    bag_count = static_cast<int64_t>(shape.lengths.size());
    features = (first_bag_ + bag_count - 1) / batch_size_ + 1;
    columns = features * (dim + gap) + gap;
    stride = columns + (spacing == Spacing::kOdd ? 3 : 4);
    for (const int64_t length : shape.lengths) offsets.push_back(offsets.back() + length);
    for (int64_t f = 0; f < features; ++f) {
      feature_columns.push_back((features - 1 - f) * (dim + gap) + gap);
      means.push_back(f % 2 == 1);
    }
    slots = random_slots(random, offsets.back(), Table::kSlots);
    for (size_t j = 0; j < slots.size() && j < 3; ++j) slots[j] = 0;
    sample_weights = random_floats(random, offsets.back());
    grad = random_floats(random, (batch_size_ - 1) * stride + columns);
  }

  int64_t lookups() const { return offsets.back(); }
  int64_t feature(int64_t bag) const { return (first_bag_ + bag) / batch_size_; }
  // Returns the offset of a bag's slice in the output and in the output's gradient.
  int64_t start(int64_t bag) const {
    return (first_bag_ + bag) % batch_size_ * stride + feature_columns[feature(bag)];
  }
  double divisor(int64_t bag) const {
    const int64_t length = offsets[bag + 1] - offsets[bag];
    return means[feature(bag)] != 0 ? static_cast<double>(std::max<int64_t>(1, length)) : 1.0;
  }

  rec_sdk::Bags bags() const {
    return {offsets.data(),
            bag_count,
            first_bag_,
            batch_size_,
            feature_columns.data(),
            reinterpret_cast<const bool*>(means.data()),
            features};
  }

  rec_sdk::LookupPooled pooled(bool weighted, std::vector<float>* out) const {
    return {table.weights, slots.data(), weighted ? sample_weights.data() : nullptr,
            bags(),        out->data(),  stride,
            columns,       lookups()};
  }

  rec_sdk::PooledWeightsGrad weights_grad(std::vector<float>* out) const {
    return {table.weights, slots.data(), bags(), grad.data(), stride, out->data(), columns, lookups()};
  }

  // Returns memory for the output, filled with 7, so that elements which a kernel does not write can be
  // found.
  std::vector<float> blank_output() const { return std::vector<float>(grad.size(), 7.0f); }

  std::vector<float> pooled_on_cpu(bool weighted) const {
    std::vector<float> out = blank_output();
    rec_sdk::cpu_kernels().lookup_pooled(pooled(weighted, &out), 0, bag_count);
    return out;
  }

  std::vector<float> weights_grad_on_cpu() const {
    std::vector<float> out(slots.size());
    rec_sdk::cpu_kernels().pooled_weights_grad(weights_grad(&out), 0, lookups());
    return out;
  }

 private:
  int64_t batch_size_, first_bag_;
};

// Returns the output of the CPU's lookup_sequence for the slots, [count, dim].
inline std::vector<float> sequence_on_cpu(const Table& table, const std::vector<int32_t>& slots) {
  std::vector<float> out(slots.size() * static_cast<size_t>(table.weights.dim));
  const auto count = static_cast<int64_t>(slots.size());
  rec_sdk::cpu_kernels().lookup_sequence({table.weights, slots.data(), out.data(), count}, 0, count);
  return out;
}

}  // namespace kernel_tests
