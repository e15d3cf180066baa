// Checks how many bytes the lookup and copy kernels move, relative to the minimum, and how evenly the cores
// share them. The lookups' batch has bag lengths of a power law. The emulator counts the bytes; nothing is
// measured on a chip.
#include "tests/ascendc_kernels/costs.h"
#include "tests/ascendc_kernels/row_kernels.h"

using ascendc_tests::gather;
using ascendc_tests::kAllCores;
using ascendc_tests::kernel_of;
using ascendc_tests::scatter;
using kernel_tests::Random;
using rec_sdk::DType;

namespace {

constexpr int64_t kSlots = 2000;

void check_costs(const ascendc_tests::Kernel& kernel, const std::string& title, int64_t least) {
  rec_sdk_emulator_reset_counters();
  kernel.run(kAllCores);
  const ascendc_tests::Moved moved = ascendc_tests::moved_by(rec_sdk_emulator_counters(), kernel.name);
  const double ratio = static_cast<double>(moved.bytes) / static_cast<double>(least);
  std::printf("%s %s: %.1f MB, %.3f of the least bytes; busiest core %.3f\n", title.c_str(), kernel.name,
              static_cast<double>(moved.bytes) * 1e-6, ratio, moved.imbalance());
  CHECK(ratio <= ascendc_tests::kMostBytes);
  CHECK(moved.imbalance() <= ascendc_tests::kMostImbalance);
}

// Returns offsets of bags with random lengths, P(length >= x) ~ x^-1.2. Some bags are empty; the longest have
// 500 lookups, almost half of a core's share.
std::vector<int64_t> power_law_offsets(Random* random, int64_t bags) {
  std::vector<int64_t> offsets{0};
  for (int64_t k = 0; k < bags; ++k) {
    const double u = (static_cast<double>(random->unit()) + 1) / 2;
    const double length = std::min(500.0, std::pow(1 - u, -1 / 1.2));
    offsets.push_back(offsets.back() + static_cast<int64_t>(length) - (random->below(5) == 0 ? 1 : 0));
  }
  return offsets;
}

void check_lookups(int64_t dim, DType dtype) {
  constexpr int64_t kBatch = 512, kFeatures = 26, kBags = kBatch * kFeatures, kIndex = 4, kOffset = 8,
                    kValue = 4;
  Random random(dim);
  const kernel_tests::Cache cache(&random, kSlots, dim, dtype, {dim});
  const std::vector<int64_t> offsets = power_law_offsets(&random, kBags);
  const int64_t lookups = offsets.back(), row = dim * rec_sdk::dtype_bytes(dtype), slice = dim * kValue;
  const std::vector<int32_t> slots = ascendc_tests::random_slots(&random, lookups, kSlots);
  std::vector<int64_t> columns;
  std::vector<uint8_t> means;
  int64_t filled = 0;
  for (int64_t f = 0; f < kFeatures; ++f) {
    columns.push_back(f * dim);
    means.push_back(f % 2 == 1);
  }
  for (int64_t k = 0; k < kBags; ++k) filled += offsets[k] < offsets[k + 1] ? 1 : 0;
  const rec_sdk::Bags bags{offsets.data(), kBags,          0,
                           kBatch,         columns.data(), reinterpret_cast<const bool*>(means.data()),
                           kFeatures};
  const int64_t width = kFeatures * dim;
  std::vector<float> weights(slots.size()), pooled(static_cast<size_t>(kBatch * width));
  std::vector<float> sequence(static_cast<size_t>(lookups * dim));

  const std::string title = "D " + std::to_string(dim) + " " + kernel_tests::name_of(dtype);
  const rec_sdk::LookupSequence s{cache.weights(), slots.data(), sequence.data(), lookups};
  check_costs(kernel_of(s), title, lookups * (kIndex + row + slice));
  rec_sdk::LookupPooled p{cache.weights(), slots.data(), nullptr, bags, pooled.data(), width, width, lookups};
  const int64_t least = lookups * (kIndex + row) + kBags * (kOffset + slice);
  check_costs(kernel_of(p), title, least);
  p.per_sample_weights = weights.data();
  check_costs(kernel_of(p), title + " weighted", least + lookups * kValue);
  const rec_sdk::PooledWeightsGrad g{cache.weights(), slots.data(),   bags,  pooled.data(),
                                     width,           weights.data(), width, lookups};
  check_costs(kernel_of(g), title, lookups * (kIndex + row + kValue) + kBags * kOffset + filled * slice);
}

void check_copies(int64_t bytes, int64_t count) {
  std::vector<uint8_t> cache(static_cast<size_t>(count * bytes)), rows(cache.size());
  std::vector<int32_t> slots;
  for (int64_t i = 0; i < count; ++i) slots.push_back(static_cast<int32_t>(count - 1 - i));
  const rec_sdk::CopyRows a{cache.data(), rows.data(), slots.data(), bytes, count, count};
  const std::string title = std::to_string(count) + " rows of " + std::to_string(bytes) + " bytes";
  const int64_t least = count * (2 * bytes + 4);
  check_costs(gather(a), title, least);
  check_costs(scatter(a), title, least);

  std::vector<uint8_t> victims(cache.size());
  std::vector<int32_t> victim_indices;
  for (int64_t i = 0; i < count; ++i) victim_indices.push_back(static_cast<int32_t>(i));
  const rec_sdk::SwapRows swap{cache.data(), rows.data(), victims.data(), slots.data(), victim_indices.data(),
                               bytes,        count,       count,          count};
  // The minimum includes 12 bytes of indices per row, because the kernel reads the slots twice.
  check_costs(kernel_of(swap), title, count * (4 * bytes + 12));
}

}  // namespace

int main() {
  for (const int64_t dim : {16, 64, 128, 512, 1000}) {
    check_lookups(dim, DType::kFloat32);
    check_lookups(dim, DType::kFloat16);
  }
  check_copies(80, 20000);
  check_copies(1552, 5000);
  check_copies(65552, 200);
  return check_result();
}
