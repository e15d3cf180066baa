// The lookups of the CPU kernels against sums in double, and their bits on every instruction set.
#include "tests/kernels/support.h"

using kernel_tests::Cache;
using kernel_tests::Checksum;
using kernel_tests::CpuKernels;
using kernel_tests::in_ranges;
using kernel_tests::kSumError;
using kernel_tests::Random;
using kernel_tests::same_bits;
using rec_sdk::DType;

namespace {

constexpr int64_t kSlots = 50;

std::string title(const char* kernel, int64_t dim, DType dtype) {
  return std::string(kernel) + " dim " + std::to_string(dim) + " " + kernel_tests::name_of(dtype);
}

std::vector<int32_t> random_slots(Random* random, int64_t count) {
  std::vector<int32_t> slots;
  for (int64_t i = 0; i < count; ++i) slots.push_back(random->below(kSlots));
  return slots;
}

void sequence(int64_t dim, DType dtype) {
  Random random(dim);
  const Cache cache(&random, kSlots, dim, dtype, {dim, 1});
  const std::vector<int32_t> slots = random_slots(&random, 201);
  const auto count = static_cast<int64_t>(slots.size());
  same_bits(title("lookup_sequence", dim, dtype), [&](const CpuKernels& kernels, Checksum* checksum) {
    std::vector<float> out(static_cast<size_t>(count * dim), 7.0f);
    const rec_sdk::LookupSequence arguments{cache.weights(), slots.data(), out.data(), count};
    in_ranges(count, [&](int64_t begin, int64_t end) { kernels.lookup_sequence(arguments, begin, end); });
    for (int64_t i = 0; i < count * dim; ++i) CHECK(out[i] == cache.weight(slots[i / dim], i % dim));
    checksum->add(out);
  });
}

// Every 16-bit pattern there is.
void every_pattern(DType dtype) {
  constexpr int64_t kDim = 64, kRows = 1024;
  std::vector<uint16_t> patterns(kDim * kRows);
  std::vector<int32_t> slots(kRows);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
  const auto* data = reinterpret_cast<const uint8_t*>(patterns.data());
  same_bits(title("every pattern", kDim, dtype), [&](const CpuKernels& kernels, Checksum* checksum) {
    std::vector<float> out(patterns.size());
    const rec_sdk::LookupSequence arguments{
        {data, kDim * 2, kRows, kDim, dtype}, slots.data(), out.data(), kRows};
    kernels.lookup_sequence(arguments, 0, kRows);
    for (size_t i = 0; i < patterns.size(); ++i) {
      const double expected = kernel_tests::value_of(patterns[i], dtype);
      CHECK(std::isnan(expected) ? std::isnan(out[i]) : out[i] == expected);
      CHECK(std::signbit(out[i]) == ((patterns[i] & 0x8000) != 0));
    }
    checksum->add(out);
  });
}

// The end of a batch of 2 features and 6 samples, one feature pooled by sum and one by mean.
struct Pooled {
  static constexpr int64_t kBatch = 6, kFirstBag = 2;

  int64_t dim, stride, bag_count;
  Cache cache;
  std::vector<int32_t> slots;
  std::vector<int64_t> offsets{0};
  int64_t columns[2];
  bool mean[2] = {false, true};
  std::vector<float> sample_weights, grad;

  Pooled(Random* random, int64_t dim_, DType dtype)
      : dim(dim_), stride(2 * dim_ + 5), cache(random, kSlots, dim_, dtype, {dim_}), columns{dim_ + 3, 0} {
    for (const int64_t length : {0, 1, 2, 31, 32, 33, 100, 1100, 5, 64})
      offsets.push_back(offsets.back() + length);
    bag_count = static_cast<int64_t>(offsets.size()) - 1;
    slots = random_slots(random, offsets.back());
    sample_weights = kernel_tests::random_floats(random, offsets.back());
    grad = kernel_tests::random_floats(random, kBatch * stride);
  }

  rec_sdk::Bags bags() const { return {offsets.data(), bag_count, kFirstBag, kBatch, columns, mean, 2}; }
  int64_t feature(int64_t bag) const { return (kFirstBag + bag) / kBatch; }
  // Where the bag's slice starts in the output and in its gradient.
  int64_t start(int64_t bag) const { return (kFirstBag + bag) % kBatch * stride + columns[feature(bag)]; }
  double divisor(int64_t bag) const {
    return mean[feature(bag)] ? static_cast<double>(std::max<int64_t>(1, offsets[bag + 1] - offsets[bag]))
                              : 1.0;
  }
};

void check_pooled(const Pooled& batch, bool weighted, const std::vector<float>& out) {
  std::vector<bool> written(out.size());
  for (int64_t bag = 0; bag < batch.bag_count; ++bag) {
    for (int64_t k = 0; k < batch.dim; ++k) {
      double sum = 0, magnitude = 0;
      for (int64_t j = batch.offsets[bag]; j < batch.offsets[bag + 1]; ++j) {
        const double weight = weighted ? static_cast<double>(batch.sample_weights[j]) : 1.0;
        sum += weight * batch.cache.weight(batch.slots[j], k);
        magnitude += std::fabs(weight * batch.cache.weight(batch.slots[j], k));
      }
      const double found = out[batch.start(bag) + k], divisor = batch.divisor(bag);
      CHECK(std::fabs(found - sum / divisor) <= kSumError * magnitude / divisor);
      written[batch.start(bag) + k] = true;
    }
  }
  for (size_t i = 0; i < out.size(); ++i) CHECK(written[i] || out[i] == 7.0f);
}

void pooled(int64_t dim, DType dtype, bool weighted) {
  Random random(dim);
  const Pooled batch(&random, dim, dtype);
  const std::string name = title(weighted ? "lookup_pooled weighted" : "lookup_pooled", dim, dtype);
  same_bits(name, [&](const CpuKernels& kernels, Checksum* checksum) {
    std::vector<float> out(static_cast<size_t>(Pooled::kBatch * batch.stride), 7.0f);
    const rec_sdk::LookupPooled arguments{
        batch.cache.weights(), batch.slots.data(),  weighted ? batch.sample_weights.data() : nullptr,
        batch.bags(),          out.data(),          batch.stride,
        batch.stride,          batch.offsets.back()};
    in_ranges(batch.bag_count,
              [&](int64_t begin, int64_t end) { kernels.lookup_pooled(arguments, begin, end); });
    check_pooled(batch, weighted, out);
    checksum->add(out);
  });
}

void weights_grad(int64_t dim, DType dtype) {
  Random random(dim);
  const Pooled batch(&random, dim, dtype);
  const int64_t lookups = batch.offsets.back();
  same_bits(title("pooled_weights_grad", dim, dtype), [&](const CpuKernels& kernels, Checksum* checksum) {
    std::vector<float> out(static_cast<size_t>(lookups));
    const rec_sdk::PooledWeightsGrad arguments{
        batch.cache.weights(), batch.slots.data(), batch.bags(), batch.grad.data(),
        batch.stride,          out.data(),         batch.stride, lookups};
    in_ranges(lookups,
              [&](int64_t begin, int64_t end) { kernels.pooled_weights_grad(arguments, begin, end); });
    for (int64_t bag = 0; bag < batch.bag_count; ++bag) {
      const float* grad = &batch.grad[batch.start(bag)];
      for (int64_t j = batch.offsets[bag]; j < batch.offsets[bag + 1]; ++j) {
        double dot = 0, magnitude = 0;
        for (int64_t k = 0; k < dim; ++k) {
          dot += grad[k] * batch.cache.weight(batch.slots[j], k);
          magnitude += std::fabs(grad[k] * batch.cache.weight(batch.slots[j], k));
        }
        CHECK(std::fabs(out[j] - dot / batch.divisor(bag)) <= kSumError * magnitude / batch.divisor(bag));
      }
    }
    checksum->add(out);
  });
}

}  // namespace

int main() {
  every_pattern(DType::kFloat16);
  every_pattern(DType::kBFloat16);
  for (const int64_t dim : kernel_tests::kDims) {
    for (const DType dtype : kernel_tests::kDTypes) {
      sequence(dim, dtype);
      pooled(dim, dtype, false);
      pooled(dim, dtype, true);
      weights_grad(dim, dtype);
    }
  }
  return check_result();
}
