// Tests of accumulate_rows, and of the kernels that copy records.
#include "tests/kernels/gradients.h"

using kernel_tests::Cache;
using kernel_tests::Checksum;
using kernel_tests::CpuKernels;
using kernel_tests::Gradients;
using kernel_tests::in_ranges;
using kernel_tests::Random;
using kernel_tests::same_bits;
using rec_sdk::DType;

namespace {

void accumulate_into(const CpuKernels& kernels, const rec_sdk::Segments& segments,
                     std::vector<float>* pending) {
  const int64_t slots = static_cast<int64_t>(pending->size()) / (2 * segments.dim);
  const rec_sdk::AccumulateRows arguments{segments, pending->data(), slots};
  std::vector<float> scratch(static_cast<size_t>(segments.dim));
  in_ranges(segments.rows, [&](int64_t begin, int64_t end) {
    kernels.accumulate_rows(arguments, begin, end, scratch.data());
  });
}

void check_pending(const std::vector<Gradients>& backwards, const std::vector<float>& pending) {
  const int64_t dim = backwards[0].dim;
  for (int64_t u = 0; u < backwards[0].rows(); ++u) {
    std::vector<Gradients::Sum> total(static_cast<size_t>(dim));
    for (const Gradients& gradients : backwards) {
      const std::vector<Gradients::Sum> sums = gradients.sums(u);
      for (int64_t k = 0; k < dim; ++k) {
        total[k].value += sums[k].value;
        total[k].error += sums[k].error;
      }
    }
    const float* row = &pending[backwards[0].unique_slots[u] * 2 * dim];
    for (int64_t k = 0; k < dim; ++k) {
      CHECK(std::fabs(static_cast<double>(row[k]) + row[dim + k] - total[k].value) <= total[k].error);
      CHECK(row[k] == row[k] + row[dim + k]);  // the sum is the float nearest to the total
    }
  }
}

void accumulate(int64_t dim, bool scaled) {
  Random random(dim);
  std::vector<Gradients> backwards;
  for (int i = 0; i < 3; ++i) {
    backwards.emplace_back(&random, dim, scaled);
    backwards.back().unique_slots = backwards.front().unique_slots;
  }
  const std::string name =
      kernel_tests::title_of("accumulate_rows", dim, DType::kFloat32, scaled ? "scaled" : "");
  same_bits(name, [&](const CpuKernels& kernels, Checksum* checksum) {
    std::vector<float> pending(static_cast<size_t>(backwards.front().slots * 2 * dim)), whole = pending;
    for (Gradients& gradients : backwards) {
      gradients.sum_chunks(kernels);
      accumulate_into(kernels, gradients.in_chunks(), &pending);
      accumulate_into(kernels, gradients.joined(), &whole);
    }
    CHECK(std::memcmp(pending.data(), whole.data(), pending.size() * sizeof(float)) == 0);
    check_pending(backwards, pending);
    checksum->add(pending);
  });
}

// Checks swap_rows; every second slot has a victim.
void check_swap(const CpuKernels& kernels, const Cache& cache, const Cache& others,
                const std::vector<int32_t>& slots) {
  const auto count = static_cast<int64_t>(slots.size()), victims = count / 2;
  const int64_t bytes = cache.layout.bytes;
  Cache swapped = cache, expected = cache;
  std::vector<uint8_t> left(static_cast<size_t>(victims * bytes)), expected_left;
  std::vector<int32_t> victim_indices;
  for (int32_t i = 0; i < count; ++i) {
    uint8_t* const row = expected.record(slots[static_cast<size_t>(i)]);
    victim_indices.push_back(i % 2 == 0 ? -1 : i / 2);
    if (i % 2 == 1) expected_left.insert(expected_left.end(), row, row + bytes);
    std::memcpy(row, others.record(i), static_cast<size_t>(bytes));
  }
  const rec_sdk::SwapRows swap{swapped.bytes.data(),
                               others.bytes.data(),
                               left.data(),
                               slots.data(),
                               victim_indices.data(),
                               bytes,
                               static_cast<int64_t>(cache.bytes.size()) / bytes,
                               count,
                               victims};
  in_ranges(count, [&](int64_t begin, int64_t end) { kernels.swap_rows(swap, begin, end); });
  CHECK(swapped.bytes == expected.bytes);
  CHECK(left == expected_left);
}

void copies(int64_t dim, DType dtype) {
  Random random(dim);
  constexpr int64_t kSlots = 100, kCopied = 37;
  const Cache cache(&random, kSlots, dim, dtype, {dim, 1});
  const Cache others(&random, kCopied, dim, dtype, {dim, 1});
  const int64_t bytes = cache.layout.bytes;
  std::vector<int32_t> slots;
  for (int32_t i = 0; i < kCopied; ++i) slots.push_back((i * 41 + 5) % kSlots);
  same_bits(kernel_tests::title_of("gather and scatter", dim, dtype), [&](const CpuKernels& kernels,
                                                                          Checksum* checksum) {
    Cache changed = cache, gathered = others, scattered = others;
    const rec_sdk::CopyRows gather{
        changed.bytes.data(), gathered.bytes.data(), slots.data(), bytes, kSlots, kCopied};
    const rec_sdk::CopyRows scatter{
        changed.bytes.data(), scattered.bytes.data(), slots.data(), bytes, kSlots, kCopied};
    in_ranges(kCopied, [&](int64_t begin, int64_t end) { kernels.gather_rows(gather, begin, end); });
    CHECK(changed.bytes == cache.bytes);
    in_ranges(kCopied, [&](int64_t begin, int64_t end) { kernels.scatter_rows(scatter, begin, end); });
    CHECK(scattered.bytes == others.bytes);
    Cache expected = cache;
    for (int64_t i = 0; i < kCopied; ++i) {
      CHECK(std::memcmp(gathered.record(i), cache.record(slots[i]), static_cast<size_t>(bytes)) == 0);
      std::memcpy(expected.record(slots[i]), others.record(i), static_cast<size_t>(bytes));
    }
    CHECK(changed.bytes == expected.bytes);
    checksum->add(gathered.bytes);
    checksum->add(changed.bytes);
    check_swap(kernels, cache, others, slots);
  });
}

}  // namespace

int main() {
  for (const int64_t dim : kernel_tests::kDims) {
    accumulate(dim, false);
    accumulate(dim, true);
    for (const DType dtype : kernel_tests::kDTypes) copies(dim, dtype);
  }
  return check_result();
}
