// Tests of lookup_sequence, lookup_pooled and pooled_weights_grad.
#include "op_kernels/common/ascendc/blocks.h"
#include "tests/ascendc_kernels/row_kernels.h"
#include "tests/kernels/lookup_batch.h"

using ascendc_tests::check_bits;
using ascendc_tests::kCores;
using ascendc_tests::kernel_of;
using ascendc_tests::random_slots;
using ascendc_tests::scaled;
using ascendc_tests::title_of;
using kernel_tests::BagShape;
using kernel_tests::LookupBatch;
using kernel_tests::Random;
using kernel_tests::Spacing;
using kernel_tests::Table;
using rec_sdk::DType;

namespace {

void check_sequence(int64_t dim, DType dtype, int64_t count) {
  Random random(dim + count);
  const Table table(&random, dim, dtype, Spacing::kOdd);
  const std::vector<int32_t> slots = random_slots(&random, count, Table::kSlots);
  const std::vector<float> expected = kernel_tests::sequence_on_cpu(table, slots);
  std::vector<float> found(expected.size());
  const rec_sdk::LookupSequence a{table.weights, slots.data(), found.data(), count};
  for (const int64_t cores : kCores) {
    const std::string title = title_of("lookup_sequence", dim, dtype);
    kernel_of(a).run(cores, title);
    check_bits(title, cores, found, expected);
  }
}

void check_pooled(const LookupBatch& batch, bool weighted, const std::string& title) {
  const std::vector<float> expected = batch.pooled_on_cpu(weighted);
  for (const int64_t cores : kCores) {
    std::vector<float> found = batch.blank_output();
    const rec_sdk::LookupPooled a = batch.pooled(weighted, &found);
    kernel_of(a).run(cores, title);
    check_bits(title, cores, found, expected);
  }
}

void check_weights_grad(const LookupBatch& batch, const std::string& title) {
  const std::vector<float> expected = batch.weights_grad_on_cpu();
  std::vector<float> found(expected.size());
  const rec_sdk::PooledWeightsGrad a = batch.weights_grad(&found);
  for (const int64_t cores : kCores) {
    kernel_of(a).run(cores, title);
    check_bits(title, cores, found, expected);
  }
}

std::vector<BagShape> shapes_for(int64_t dim) {
  std::vector<int64_t> powers;  // lengths that follow a power law
  Random random(dim);
  for (int64_t bag = 0; bag < 96; ++bag) {
    powers.push_back(scaled(2 << (random.below(1 << 8) == 0 ? 7 : random.below(4)), dim) - 2);
  }
  std::vector<BagShape> shapes = {
      {"mixed", 6, 2, {0, 1, 2, 31, 32, 33, scaled(100, dim), scaled(1100, dim), 5, scaled(64, dim)}},
      {"one bag", 1, 0, {scaled(5000, dim)}},
      {"one bag of many", 64, 0, std::vector<int64_t>(64, 0)},
      {"empty bags", 5, 3, std::vector<int64_t>(20, 0)},
      {"power law", 12, 0, powers}};
  shapes[2].lengths[40] = scaled(5000, dim);
  // With bags of equal length and a dim of 64 or 128, the rows of adjacent bags are 255 or slightly more UB
  // blocks apart.
  for (const int64_t length : {1, 2, 15, 16, 31, 32}) {
    shapes.push_back({"equal bags", 20, 0, std::vector<int64_t>(40, length)});
    shapes.back().lengths[33] = 3;
  }
  if (dim <= 64) {  // more bags than fit in a window of the search for a core's share
    shapes.push_back({"many bags", 300, 100, {}});
    for (int64_t bag = 0; bag < 2000; ++bag) shapes.back().lengths.push_back(random.below(3));
  }
  return shapes;
}

void check_bags(int64_t dim, DType dtype, const std::vector<BagShape>& shapes) {
  for (const BagShape& shape : shapes) {
    Random random(dim);
    const LookupBatch batch(&random, dim, dtype, shape, Spacing::kOdd);
    check_pooled(batch, false, title_of("lookup_pooled", dim, dtype, shape.name));
    check_pooled(batch, true, title_of("lookup_pooled weighted", dim, dtype, shape.name));
    if (batch.lookups() > 0)
      check_weights_grad(batch, title_of("pooled_weights_grad", dim, dtype, shape.name));
  }
}

// Rows so wide that a bag is read in several loads, each of which reads the slots of its tile. A core has
// more lookups than fit in three chunks of its stream of slots.
void check_slots_of_loads() {
  std::vector<int64_t> lengths(460, 7);
  lengths[40] = 90;
  const BagShape shape{"several loads", 460, 0, lengths};
  for (const auto& [dim, dtype] : {std::pair{int64_t{250}, DType::kFloat32}, {528, DType::kBFloat16}}) {
    Random random(dim);
    const LookupBatch batch(&random, dim, dtype, shape, Spacing::kOdd);
    check_weights_grad(batch, title_of("pooled_weights_grad", dim, dtype, shape.name));
  }
}

void check_blocks() {
  using rec_sdk::ascendc::blocks_of;
  rec_sdk::LookupSequence a{{nullptr, 256, Table::kSlots, 64, DType::kFloat32}, nullptr, nullptr, 0};
  CHECK(blocks_of(a, 48) == 0);
  a.count = 1;
  CHECK(blocks_of(a, 48) == 1);
  a.count = 100000;
  CHECK(blocks_of(a, 48) == 48);
}

}  // namespace

int main() {
  check_blocks();
  check_slots_of_loads();
  Deal deal(2);
  for (const int64_t dim : ascendc_tests::kDims) {
    for (const DType dtype : kernel_tests::kDTypes) {
      if (!deal.next()) continue;
      check_sequence(dim, dtype, 1);
      check_sequence(dim, dtype, scaled(3001, dim));
      check_bags(dim, dtype, shapes_for(dim));
    }
  }
  for (const int64_t dim : ascendc_tests::widths()) {
    for (const DType dtype : kernel_tests::kDTypes) {
      if (!deal.next()) continue;
      check_sequence(dim, dtype, 9);
      check_bags(dim, dtype, {{"any width", 2, 0, {3, 1, 0, 5}}});
    }
  }
  check_sequence(30011, DType::kFloat32, 5);
  check_sequence(30011, DType::kBFloat16, 5);
  return check_result();
}
