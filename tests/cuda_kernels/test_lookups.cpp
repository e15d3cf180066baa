// Tests of lookup_sequence, lookup_pooled and pooled_weights_grad.
#include "tests/cuda_kernels/support.h"
#include "tests/kernels/lookup_batch.h"

using cuda_tests::check_bits;
using cuda_tests::in_every_order;
using cuda_tests::scaled;
using kernel_tests::BagShape;
using kernel_tests::LookupBatch;
using kernel_tests::Random;
using kernel_tests::Spacing;
using kernel_tests::Table;
using rec_sdk::DType;

namespace {

std::string title_of(const char* kernel, int64_t dim, DType dtype, Spacing spacing, const std::string& rest) {
  return kernel_tests::title_of(kernel, dim, dtype, std::string(cuda_tests::name_of(spacing)) + " " + rest);
}

// Checks lookup_sequence; the output starts `shift` floats after a multiple of 16 bytes.
void check_sequence(int64_t dim, DType dtype, Spacing spacing, int64_t count, int64_t shift = 0) {
  Random random(dim + count);
  const Table table(&random, dim, dtype, spacing);
  const std::vector<int32_t> slots = kernel_tests::random_slots(&random, count, Table::kSlots);
  std::vector<float> expected = kernel_tests::sequence_on_cpu(table, slots);
  expected.insert(expected.begin(), static_cast<size_t>(shift), 7.0f);
  const std::string variant = std::to_string(count) + " lookups, output at " + std::to_string(shift);
  in_every_order(title_of("lookup_sequence", dim, dtype, spacing, variant), [&](const std::string& where) {
    std::vector<float> found(expected.size(), 7.0f);
    const rec_sdk::LookupSequence a{table.weights, slots.data(), found.data() + shift, count};
    CHECK(rec_sdk::cuda::lookup_sequence(a, nullptr) == cudaSuccess);
    check_bits(where, found, expected);
  });
}

void check_pooled(const LookupBatch& batch, bool weighted, const std::string& title) {
  const std::vector<float> expected = batch.pooled_on_cpu(weighted);
  in_every_order(title, [&](const std::string& where) {
    std::vector<float> found = batch.blank_output();
    CHECK(rec_sdk::cuda::lookup_pooled(batch.pooled(weighted, &found), nullptr) == cudaSuccess);
    check_bits(where, found, expected);
  });
}

void check_weights_grad(const LookupBatch& batch, const std::string& title) {
  const std::vector<float> expected = batch.weights_grad_on_cpu();
  in_every_order(title, [&](const std::string& where) {
    std::vector<float> found(expected.size());
    CHECK(rec_sdk::cuda::pooled_weights_grad(batch.weights_grad(&found), nullptr) == cudaSuccess);
    check_bits(where, found, expected);
  });
}

void check_bags(int64_t dim, DType dtype, Spacing spacing, const BagShape& shape) {
  Random random(dim);
  const LookupBatch batch(&random, dim, dtype, shape, spacing);
  check_pooled(batch, false, title_of("lookup_pooled", dim, dtype, spacing, shape.name));
  check_pooled(batch, true, title_of("lookup_pooled weighted", dim, dtype, spacing, shape.name));
  check_weights_grad(batch, title_of("pooled_weights_grad", dim, dtype, spacing, shape.name));
}

// Checks batches of several shapes. The first shape starts within a feature; it has bags of 0 to 5 blocks of
// 32 lookups, and an empty bag at each end.
void check_shapes(int64_t dim, DType dtype, Spacing spacing) {
  const auto most = [&](int64_t count) { return scaled(count, dim); };
  const BagShape shapes[] = {
      {"mixed", 6, 2, {0, 1, 2, most(31), most(32), most(33), most(64), most(100), 5, most(130), 1, 1, 0}},
      {"few long bags", 2, 0, {most(700), most(33)}},
      {"empty bags", 5, 3, std::vector<int64_t>(20, 0)},
  };
  for (const BagShape& shape : shapes) {
    if (dim <= 1000 || shape.first_bag > 0) check_bags(dim, dtype, spacing, shape);
  }
}

// Returns a shape with so many bags that each team of threads gets one; some bags are too long for a team.
BagShape long_among_short(const char* name, const std::vector<int64_t>& long_bags) {
  BagShape shape{name, 700, 100, {}};
  Random random(3);
  for (int64_t bag = 0; bag < 2000; ++bag) shape.lengths.push_back(random.below(3));
  for (size_t i = 0; i < long_bags.size(); ++i) shape.lengths[i * 37 + 5] = long_bags[i];
  return shape;
}

}  // namespace

int main() {
  Deal deal(2);
  for (const int64_t dim : cuda_tests::kDims) {
    for (const DType dtype : kernel_tests::kDTypes) {
      for (const Spacing spacing : cuda_tests::kSpacings) {
        if (!deal.next()) continue;
        for (const int64_t count : {int64_t{0}, int64_t{1}, scaled(1001, dim)}) {
          check_sequence(dim, dtype, spacing, count);
        }
        check_shapes(dim, dtype, spacing);
      }
    }
  }
  for (const int64_t count : {2, 3, 4, 5, 6, 7, 8})
    check_sequence(8, DType::kFloat32, Spacing::kRecords, count);
  for (const int64_t shift : {1, 2}) check_sequence(64, DType::kFloat16, Spacing::kRecords, 100, shift);
  check_sequence(30011, DType::kBFloat16, Spacing::kRecords, 5);
  for (const Spacing spacing : cuda_tests::kSpacings) {
    check_bags(8, DType::kFloat32, spacing,
               long_among_short("long bags", {511, 512, 513, 1024, 1025, 2000, 4097}));
    check_bags(20, DType::kFloat32, spacing, {"one long bag", 1, 0, {5000}});
    check_bags(16, DType::kBFloat16, spacing, {"three long bags", 3, 0, {2999, 0, 3001}});
  }
  check_bags(4, DType::kFloat16, Spacing::kRecords, long_among_short("a very long bag", {70000}));
  check_bags(16, DType::kFloat32, Spacing::kRecords, {"no bags", 4, 0, {}});
  return check_result();
}
