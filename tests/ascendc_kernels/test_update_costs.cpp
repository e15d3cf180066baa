// Checks how many bytes update_rows and accumulate_rows move for a batch with power-law ids, relative to the
// minimum, and how evenly the cores share them. The emulator counts the bytes; nothing is measured on a chip.
#include <cmath>
#include <map>

#include "tests/ascendc_kernels/costs.h"
#include "tests/ascendc_kernels/update_batch.h"

using ascendc_tests::Batch;
using ascendc_tests::kAllCores;
using kernel_tests::Cache;
using kernel_tests::Random;
using rec_sdk::DType;

namespace {

// Draws ids, id i with a probability proportional to i^-exponent, and returns the number of lookups of each
// distinct id in order of first appearance.
std::vector<int32_t> power_law(Random* random, int64_t lookups, int64_t ids, double exponent) {
  std::vector<double> cumulative;
  double sum = 0;
  for (int64_t i = 1; i <= ids; ++i) cumulative.push_back(sum += std::pow(static_cast<double>(i), -exponent));
  std::vector<int32_t> lengths;
  std::map<int64_t, size_t> row_of;
  for (int64_t j = 0; j < lookups; ++j) {
    const double at = (random->unit() + 1) / 2 * sum;
    const int64_t id = std::lower_bound(cumulative.begin(), cumulative.end(), at) - cumulative.begin();
    const auto [row, added] = row_of.emplace(id, lengths.size());
    if (added) lengths.push_back(0);
    ++lengths[row->second];
  }
  return lengths;
}

int64_t least_bytes(const Batch& batch, int64_t record_bytes) {
  const int64_t of_lookup = batch.dim * 4 + 4 + (batch.scale.empty() ? 0 : 8);
  return batch.lookups() * of_lookup + batch.rows() * (2 * record_bytes + 8);
}

void check_costs(const std::string& title, int64_t least, const char* kernel) {
  const std::string json = rec_sdk_emulator_counters();
  rec_sdk_emulator_reset_counters();
  int64_t bytes = 0, time = 0;  // time: bytes of the busiest core, summed over launches
  std::printf("%s:", title.c_str());
  for (const std::string& launch : {std::string("sum_chunks"), std::string(kernel)}) {
    const ascendc_tests::Moved moved = ascendc_tests::moved_by(json, launch);
    bytes += moved.bytes;
    time += moved.of_busiest_core;
    std::printf(" %s %.2f MB, busiest core %.3f;", launch.c_str(), static_cast<double>(moved.bytes) * 1e-6,
                moved.imbalance());
  }
  const double ratio = static_cast<double>(bytes) / static_cast<double>(least);
  const double balance = static_cast<double>(time * kAllCores) / static_cast<double>(bytes);
  std::printf(" bytes %.3f of the least, time %.3f of balanced\n", ratio, balance);
  CHECK(ratio <= ascendc_tests::kMostBytes);
  CHECK(balance <= ascendc_tests::kMostImbalance);
}

void check_optimizers(const Batch& batch, Random* random, const std::string& title) {
  static Deal deal(5);
  for (const ascendc_tests::OptimizerCase& optimizer : ascendc_tests::kOptimizers) {
    if (!deal.next()) continue;
    const DType dtype = DType::kFloat32;
    Cache cache(random, batch.slots, batch.dim, dtype, ascendc_tests::states_of(optimizer, batch.dim));
    const ascendc_tests::Tables tables(optimizer, batch.rows());
    const rec_sdk::UpdateRows a{
        batch.segments(),           cache.bytes.data(), cache.layout, tables.offsets.data(), 4,
        tables.coefficients.data(), cache.slots};
    std::vector<uint8_t> workspace = ascendc_tests::workspace_for(batch);
    ascendc_tests::run_update_rows("", a, optimizer.name, workspace.data(), kAllCores);
    check_costs(title + " " + optimizer.name, least_bytes(batch, cache.layout.bytes), "update_rows");
  }
  std::vector<float> pending(static_cast<size_t>(batch.slots * 2 * batch.dim));
  const rec_sdk::AccumulateRows a{batch.segments(), pending.data(), batch.slots};
  std::vector<uint8_t> workspace = ascendc_tests::workspace_for(batch);
  ascendc_tests::run_accumulate_rows("", a, workspace.data(), kAllCores);
  check_costs(title + " accumulate", least_bytes(batch, batch.dim * 8), "accumulate_rows");
}

void check_batch(int64_t dim, double exponent, bool scaled) {
  Random random(dim);
  const Batch batch(&random, dim, power_law(&random, 1 << 17, 1000000, exponent), scaled);
  char title[80];
  std::snprintf(title, sizeof title, "D %d, exponent %.1f, %d rows%s", static_cast<int>(dim), exponent,
                static_cast<int>(batch.rows()), scaled ? ", scaled" : "");
  check_optimizers(batch, &random, title);
}

}  // namespace

int main() {
  rec_sdk_emulator_reset_counters();
  check_batch(64, 1.1, false);
  check_batch(64, 1.1, true);
  check_batch(128, 0.8, false);
  check_batch(128, 1.1, true);
  return check_result();
}
