// Compares lookups by the CPU kernels with sums in double, and checks that all instruction sets give the same
// bits.
#include "tests/kernels/lookup_batch.h"

using kernel_tests::Cache;
using kernel_tests::Checksum;
using kernel_tests::CpuKernels;
using kernel_tests::in_ranges;
using kernel_tests::kSumError;
using kernel_tests::LookupBatch;
using kernel_tests::Random;
using kernel_tests::same_bits;
using kernel_tests::title_of;
using rec_sdk::DType;

namespace {

void sequence(int64_t dim, DType dtype) {
  Random random(dim);
  const Cache cache(&random, 50, dim, dtype, {dim, 1});
  const std::vector<int32_t> slots = kernel_tests::random_slots(&random, 201, cache.slots);
  const auto count = static_cast<int64_t>(slots.size());
  same_bits(title_of("lookup_sequence", dim, dtype), [&](const CpuKernels& kernels, Checksum* checksum) {
    std::vector<float> out(static_cast<size_t>(count * dim), 7.0f);
    const rec_sdk::LookupSequence arguments{cache.weights(), slots.data(), out.data(), count};
    in_ranges(count, [&](int64_t begin, int64_t end) { kernels.lookup_sequence(arguments, begin, end); });
    for (int64_t i = 0; i < count * dim; ++i) CHECK(out[i] == cache.weight(slots[i / dim], i % dim));
    checksum->add(out);
  });
}

// Looks up weights that contain every 16-bit pattern.
void every_pattern(DType dtype) {
  constexpr int64_t kDim = 64, kRows = 1024;
  std::vector<uint16_t> patterns(kDim * kRows);
  std::vector<int32_t> slots(kRows);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
  const auto* data = reinterpret_cast<const uint8_t*>(patterns.data());
  same_bits(title_of("every pattern", kDim, dtype), [&](const CpuKernels& kernels, Checksum* checksum) {
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

// Returns the last 10 of the 12 bags of 2 features and 6 samples; one feature is pooled by sum, the other by
// mean.
LookupBatch batch_of(int64_t dim, DType dtype) {
  Random random(dim);
  const kernel_tests::BagShape shape{"", 6, 2, {0, 1, 2, 31, 32, 33, 100, 1100, 5, 64}};
  return LookupBatch(&random, dim, dtype, shape, kernel_tests::Spacing::kOdd);
}

void check_pooled(const LookupBatch& batch, bool weighted, const std::vector<float>& out) {
  std::vector<bool> written(out.size());
  for (int64_t bag = 0; bag < batch.bag_count; ++bag) {
    for (int64_t k = 0; k < batch.dim; ++k) {
      double sum = 0, magnitude = 0;
      for (int64_t j = batch.offsets[bag]; j < batch.offsets[bag + 1]; ++j) {
        const double weight = weighted ? static_cast<double>(batch.sample_weights[j]) : 1.0;
        sum += weight * batch.table.weight(batch.slots[j], k);
        magnitude += std::fabs(weight * batch.table.weight(batch.slots[j], k));
      }
      const double found = out[batch.start(bag) + k], divisor = batch.divisor(bag);
      CHECK(std::fabs(found - sum / divisor) <= kSumError * magnitude / divisor);
      written[batch.start(bag) + k] = true;
    }
  }
  for (size_t i = 0; i < out.size(); ++i) CHECK(written[i] || out[i] == 7.0f);
}

void pooled(int64_t dim, DType dtype, bool weighted) {
  const LookupBatch batch = batch_of(dim, dtype);
  const std::string name = title_of(weighted ? "lookup_pooled weighted" : "lookup_pooled", dim, dtype);
  same_bits(name, [&](const CpuKernels& kernels, Checksum* checksum) {
    std::vector<float> out = batch.blank_output();
    const rec_sdk::LookupPooled arguments = batch.pooled(weighted, &out);
    in_ranges(batch.bag_count,
              [&](int64_t begin, int64_t end) { kernels.lookup_pooled(arguments, begin, end); });
    check_pooled(batch, weighted, out);
    checksum->add(out);
  });
}

void weights_grad(int64_t dim, DType dtype) {
  const LookupBatch batch = batch_of(dim, dtype);
  const int64_t lookups = batch.lookups();
  same_bits(title_of("pooled_weights_grad", dim, dtype), [&](const CpuKernels& kernels, Checksum* checksum) {
    std::vector<float> out(static_cast<size_t>(lookups));
    const rec_sdk::PooledWeightsGrad arguments = batch.weights_grad(&out);
    in_ranges(lookups,
              [&](int64_t begin, int64_t end) { kernels.pooled_weights_grad(arguments, begin, end); });
    for (int64_t bag = 0; bag < batch.bag_count; ++bag) {
      const float* grad = &batch.grad[batch.start(bag)];
      for (int64_t j = batch.offsets[bag]; j < batch.offsets[bag + 1]; ++j) {
        double dot = 0, magnitude = 0;
        for (int64_t k = 0; k < dim; ++k) {
          dot += grad[k] * batch.table.weight(batch.slots[j], k);
          magnitude += std::fabs(grad[k] * batch.table.weight(batch.slots[j], k));
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
