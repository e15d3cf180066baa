// lookup_sequence, lookup_pooled and pooled_weights_grad.
#include "op_kernels/common/ascendc/blocks.h"
#include "op_kernels/lookup_pooled/ascendc.h"
#include "op_kernels/lookup_sequence/ascendc.h"
#include "op_kernels/pooled_weights_grad/ascendc.h"
#include "tests/ascendc_kernels/support.h"
#include "torch_npu_ext/emulator/kernels/lookup_buffers.h"

using ascendc_tests::check_bits;
using ascendc_tests::kCores;
using ascendc_tests::random_slots;
using ascendc_tests::scaled;
using ascendc_tests::title_of;
using kernel_tests::Random;
using rec_sdk::cpu_kernels;
using rec_sdk::DType;

namespace {

constexpr int64_t kSlots = 50;

// Rows an odd number of values apart: no row but the first starts at a multiple of anything. Row 0 is all -0.
struct Table {
  rec_sdk::Weights weights;
  std::vector<uint8_t> bytes;

  Table(Random* random, int64_t dim, DType dtype) {
    const int64_t value_bytes = rec_sdk::dtype_bytes(dtype), stride = (dim + 1 + dim % 2 + 1) * value_bytes;
    const kernel_tests::Cache cache(random, kSlots, dim, dtype, {});
    bytes.resize(static_cast<size_t>((kSlots - 1) * stride + dim * value_bytes));
    for (int64_t s = 0; s < kSlots; ++s) {
      std::memcpy(bytes.data() + s * stride, cache.record(s), static_cast<size_t>(dim * value_bytes));
    }
    for (int64_t i = 0; i < dim * value_bytes; ++i) bytes[i] = (i + 1) % value_bytes == 0 ? 0x80 : 0;
    weights = {bytes.data(), stride, kSlots, dim, dtype};
  }
};

void check_sequence(int64_t dim, DType dtype, int64_t count) {
  Random random(dim + count);
  const Table table(&random, dim, dtype);
  const std::vector<int32_t> slots = random_slots(&random, count, kSlots);
  const auto values = static_cast<size_t>(count * dim);
  std::vector<float> expected(values), found(values);
  rec_sdk::LookupSequence a{table.weights, slots.data(), expected.data(), count};
  cpu_kernels().lookup_sequence(a, 0, count);
  a.out = found.data();
  for (const int64_t cores : kCores) {
    const std::string title = title_of("lookup_sequence", dim, dtype);
    ascendc_tests::run(title, cores, rec_sdk::emulator::buffers_of(a),
                       [&] { rec_sdk::ascendc::lookup_sequence(a); });
    check_bits(title, cores, found, expected);
  }
}

struct Shape {
  const char* name;
  int64_t batch_size, first_bag;
  std::vector<int64_t> lengths;  // of the bags
};

struct Batch {
  int64_t dim, bag_count, features, columns, stride;
  Table table;
  std::vector<int64_t> offsets{0}, feature_columns;
  std::vector<uint8_t> means;
  std::vector<int32_t> slots;
  std::vector<float> sample_weights, grad;
  Shape shape;

  // A feature's slice starts where the one before ends, with a gap of one column; every other feature is a
  // mean.
  Batch(Random* random, int64_t dim_, DType dtype, const Shape& shape_)
      : dim(dim_), table(random, dim_, dtype), shape(shape_) {
    bag_count = static_cast<int64_t>(shape.lengths.size());
    features = (shape.first_bag + bag_count - 1) / shape.batch_size + 1;
    columns = features * (dim + 1) + 1;
    stride = columns + 3;
    for (const int64_t length : shape.lengths) offsets.push_back(offsets.back() + length);
    for (int64_t f = 0; f < features; ++f) {
      feature_columns.push_back((features - 1 - f) * (dim + 1) + 1);
      means.push_back(f % 2 == 1);
    }
    slots = random_slots(random, offsets.back(), kSlots);
    for (size_t j = 0; j < slots.size() && j < 3; ++j) slots[j] = 0;
    sample_weights = kernel_tests::random_floats(random, offsets.back());
    grad = kernel_tests::random_floats(random, (shape.batch_size - 1) * stride + columns);
  }

  int64_t lookups() const { return offsets.back(); }
  rec_sdk::Bags bags() const {
    return {offsets.data(),
            bag_count,
            shape.first_bag,
            shape.batch_size,
            feature_columns.data(),
            reinterpret_cast<const bool*>(means.data()),
            features};
  }
};

void check_pooled(const Batch& batch, bool weighted, const std::string& title) {
  std::vector<float> expected(batch.grad.size(), 7.0f);
  rec_sdk::LookupPooled a{
      batch.table.weights, batch.slots.data(), weighted ? batch.sample_weights.data() : nullptr,
      batch.bags(),        expected.data(),    batch.stride,
      batch.columns,       batch.lookups()};
  cpu_kernels().lookup_pooled(a, 0, batch.bag_count);
  for (const int64_t cores : kCores) {
    std::vector<float> found(expected.size(), 7.0f);
    a.out = found.data();
    ascendc_tests::run(title, cores, rec_sdk::emulator::buffers_of(a),
                       [&] { rec_sdk::ascendc::lookup_pooled(a); });
    check_bits(title, cores, found, expected);
  }
}

void check_weights_grad(const Batch& batch, const std::string& title) {
  std::vector<float> expected(batch.slots.size()), found(batch.slots.size());
  rec_sdk::PooledWeightsGrad a{batch.table.weights, batch.slots.data(), batch.bags(),  batch.grad.data(),
                               batch.stride,        expected.data(),    batch.columns, batch.lookups()};
  cpu_kernels().pooled_weights_grad(a, 0, batch.lookups());
  a.out = found.data();
  for (const int64_t cores : kCores) {
    ascendc_tests::run(title, cores, rec_sdk::emulator::buffers_of(a),
                       [&] { rec_sdk::ascendc::pooled_weights_grad(a); });
    check_bits(title, cores, found, expected);
  }
}

std::vector<Shape> shapes_for(int64_t dim) {
  std::vector<int64_t> powers;  // lengths of a power law
  Random random(dim);
  for (int64_t bag = 0; bag < 96; ++bag) {
    powers.push_back(scaled(2 << (random.below(1 << 8) == 0 ? 7 : random.below(4)), dim) - 2);
  }
  std::vector<Shape> shapes = {
      {"mixed", 6, 2, {0, 1, 2, 31, 32, 33, scaled(100, dim), scaled(1100, dim), 5, scaled(64, dim)}},
      {"one bag", 1, 0, {scaled(5000, dim)}},
      {"one bag of many", 64, 0, std::vector<int64_t>(64, 0)},
      {"empty bags", 5, 3, std::vector<int64_t>(20, 0)},
      {"power law", 12, 0, powers}};
  shapes[2].lengths[40] = scaled(5000, dim);
  if (dim <= 64) {  // more than a window of the search for a core's share
    shapes.push_back({"many bags", 300, 100, {}});
    for (int64_t bag = 0; bag < 2000; ++bag) shapes.back().lengths.push_back(random.below(3));
  }
  return shapes;
}

void check_bags(int64_t dim, DType dtype) {
  for (const Shape& shape : shapes_for(dim)) {
    Random random(dim);
    const Batch batch(&random, dim, dtype, shape);
    check_pooled(batch, false, title_of("lookup_pooled", dim, dtype, shape.name));
    check_pooled(batch, true, title_of("lookup_pooled weighted", dim, dtype, shape.name));
    if (batch.lookups() > 0)
      check_weights_grad(batch, title_of("pooled_weights_grad", dim, dtype, shape.name));
  }
}

void check_blocks() {
  using rec_sdk::ascendc::blocks_of;
  rec_sdk::LookupSequence a{{nullptr, 256, kSlots, 64, DType::kFloat32}, nullptr, nullptr, 0};
  CHECK(blocks_of(a, 48) == 0);
  a.count = 1;
  CHECK(blocks_of(a, 48) == 1);
  a.count = 100000;
  CHECK(blocks_of(a, 48) == 48);
}

}  // namespace

int main() {
  check_blocks();
  for (const int64_t dim : ascendc_tests::kDims) {
    for (const DType dtype : kernel_tests::kDTypes) {
      check_sequence(dim, dtype, 1);
      check_sequence(dim, dtype, scaled(3001, dim));
      check_bags(dim, dtype);
    }
  }
  check_sequence(30011, DType::kFloat32, 5);
  check_sequence(30011, DType::kBFloat16, 5);
  return check_result();
}
