// Tests of update_rows and accumulate_rows. With the command line arguments I and N, only batches I, I + N,
// ... run, so that several processes can share the work.
#include "tests/cuda_kernels/support.h"
#include "tests/kernels/update_batch.h"

using cuda_tests::in_every_order;
using kernel_tests::Cache;
using kernel_tests::OptimizerCase;
using kernel_tests::Random;
using kernel_tests::short_rows;
using kernel_tests::Spacing;
using kernel_tests::States;
using kernel_tests::UpdateBatch;
using kernel_tests::with_hot_rows;
using rec_sdk::DType;

namespace {

using Bytes = std::vector<uint8_t>;

int64_t part = 0, parts = 1;

// Returns a workspace filled with 0xA5, as results must not depend on its contents.
Bytes workspace_for(const UpdateBatch& batch) {
  return Bytes(static_cast<size_t>(rec_sdk::cuda::segments_workspace(batch.segments())), 0xA5);
}

void* address_of(Bytes& workspace) { return workspace.empty() ? nullptr : workspace.data(); }

// Compares an update with the CPU's. Every second update of 16-bit weights rounds stochastically, and every
// third update writes norms.
template <class Check>
void check_update(const UpdateBatch& batch, const Cache& cache, const OptimizerCase& optimizer,
                  const std::string& of_what, const Check& check) {
  static int64_t roundings = 0;
  const bool stochastic = cache.layout.weight_dtype != DType::kFloat32 && roundings++ % 2 == 0;
  const std::string title = of_what + (stochastic ? " stochastic" : "");
  const kernel_tests::Tables tables(optimizer, batch.rows(), stochastic);
  static int64_t updates = 0;
  std::vector<float> norms = kernel_tests::norms_for(batch);
  const bool counts = updates++ % 3 == 0;
  const Bytes expected =
      kernel_tests::updated_on_cpu(batch, tables, optimizer.name, cache, counts ? &norms : nullptr);
  in_every_order(title, [&](const std::string& where) {
    Bytes found = cache.bytes, workspace = workspace_for(batch);
    std::vector<float> counted = kernel_tests::norms_for(batch);
    const rec_sdk::UpdateRows a =
        kernel_tests::update_arguments(batch, tables, cache, &found, counts ? &counted : nullptr);
    CHECK(rec_sdk::cuda::update_rows(a, optimizer.name, address_of(workspace), nullptr) == cudaSuccess);
    check(where, found, expected);
    cuda_tests::check_bits(where + " norms", kernel_tests::with_one_nan(counted),
                           kernel_tests::with_one_nan(norms));
  });
}

void check_accumulate(const UpdateBatch& batch, Random* random, const std::string& title) {
  const std::vector<float> before = kernel_tests::random_floats(random, batch.slots * 2 * batch.dim);
  const std::vector<float> expected = kernel_tests::accumulated_on_cpu(batch, before);
  in_every_order(title, [&](const std::string& where) {
    std::vector<float> found = before;
    Bytes workspace = workspace_for(batch);
    const rec_sdk::AccumulateRows a{batch.segments(), found.data(), batch.slots};
    CHECK(rec_sdk::cuda::accumulate_rows(a, address_of(workspace), nullptr) == cudaSuccess);
    cuda_tests::check_bits(where, found, expected);
  });
}

std::string title_of(const char* name, const UpdateBatch& batch, DType dtype, Spacing spacing,
                     const char* rows) {
  return kernel_tests::title_of(
      name, batch.dim, dtype,
      std::string(cuda_tests::name_of(spacing)) + (batch.scale.empty() ? " " : " scaled ") + rows);
}

// Tests a batch with a part of the pairs of optimizer and data type, since all of them would take too long:
// every seventh pair, or in full tests every third, from another pair on in each batch. Half of the batches
// have mixed state types.
void check_batch(int64_t dim, const std::vector<int32_t>& lengths, const char* rows, bool scaled,
                 Spacing spacing, int64_t gradients = 1) {
  static int64_t turn = 0;
  if (++turn % parts != part) return;
  Random random(dim);
  UpdateBatch batch(&random, dim, lengths, scaled, spacing);
  if (gradients > 1) batch.split_gradient(&random, gradients);
  int64_t pair = turn;
  const int64_t share = full_tests() ? 3 : 7;
  const States states = turn / 3 % 2 == 0 ? States::kFloats : States::kMixed;
  for (const OptimizerCase& optimizer : kernel_tests::kOptimizers) {
    for (const DType dtype : kernel_tests::kDTypes) {
      if (++pair % share != 0) continue;
      Cache cache(&random, batch.slots, dim, dtype, kernel_tests::states_of(optimizer, dim), states);
      kernel_tests::fill_padding(&cache);
      const std::string title = title_of(optimizer.name, batch, dtype, spacing, rows);
      check_update(batch, cache, optimizer, states == States::kMixed ? title + " mixed states" : title,
                   cuda_tests::check_bits<uint8_t>);
    }
  }
  check_accumulate(batch, &random, title_of("accumulate", batch, DType::kFloat32, spacing, rows));
}

void check_all(int64_t dim, const std::vector<int32_t>& lengths, const char* rows) {
  check_batch(dim, lengths, rows, false, Spacing::kOdd);
  check_batch(dim, lengths, rows, false, Spacing::kRecords);
  check_batch(dim, lengths, rows, true, Spacing::kOdd);
  check_batch(dim, lengths, rows, true, Spacing::kRecords);
}

void check_special_values(bool scaled) {
  Random random(1);
  UpdateBatch batch(&random, 20, short_rows(200), scaled);
  kernel_tests::add_special_values(&random, &batch);
  static Deal deal(5);
  for (const OptimizerCase& optimizer : kernel_tests::kOptimizers) {
    for (const DType dtype : kernel_tests::kDTypes) {
      if (!deal.next()) continue;
      Cache cache(&random, batch.slots, batch.dim, dtype, kernel_tests::states_of(optimizer, batch.dim),
                  scaled ? States::kMixed : States::kFloats);
      kernel_tests::add_special_values(&random, &cache);
      check_update(batch, cache, optimizer,
                   title_of(optimizer.name, batch, dtype, Spacing::kOdd, "special values"),
                   [&](const std::string& where, const Bytes& found, const Bytes& expected) {
                     cuda_tests::check_bits(where, kernel_tests::without_nans(cache.layout, found),
                                            kernel_tests::without_nans(cache.layout, expected));
                   });
    }
  }
}

// Tests that a sum of zeros that are all -0 stays -0. The update by SGD shows the difference, because all
// weights are -0.
void check_signs_of_zero(bool scaled) {
  Random random(2);
  UpdateBatch batch(&random, 12, short_rows(100), scaled);
  for (float& g : batch.grad) g = random.below(4) == 0 ? 0.0f : -0.0f;
  for (float& scale : batch.scale) scale = std::fabs(scale);
  Cache cache(&random, batch.slots, batch.dim, DType::kFloat32, {});
  for (size_t i = 0; i < cache.bytes.size(); ++i) cache.bytes[i] = i % 4 == 3 ? 0x80 : 0;
  check_update(batch, cache, kernel_tests::kOptimizers[0],
               title_of("sgd", batch, DType::kFloat32, Spacing::kOdd, "zeros"),
               cuda_tests::check_bits<uint8_t>);
}

void check_unknown_optimizer() {
  CHECK(rec_sdk::cuda::update_rows({}, "no_such", nullptr, nullptr) == cudaErrorInvalidValue);
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 3) {
    part = std::stoll(arguments[1]);
    parts = std::stoll(arguments[2]);
  }
  check_unknown_optimizer();
  check_special_values(false);
  check_special_values(true);
  check_signs_of_zero(false);
  check_signs_of_zero(true);
  for (const int64_t dim : cuda_tests::kDims) {
    check_all(dim, short_rows(dim < 500 ? 17 : dim < 2000 ? 9 : 6), "short rows");
  }
  const std::vector<int32_t> around_chunks = {127, 128, 129, 160,  224,  225, 255,
                                              256, 512, 513, 1024, 1025, 3000};
  for (const int64_t dim : {3, 4, 16, 20}) {
    check_batch(dim, with_hot_rows(short_rows(60), around_chunks), "hot rows", dim % 8 == 0,
                Spacing::kRecords);
  }
  check_batch(132, with_hot_rows(short_rows(20), {513, 225}), "wide hot rows", true, Spacing::kRecords);
  check_batch(4, with_hot_rows(short_rows(100), {70000}), "a very hot row", true, Spacing::kOdd);
  check_batch(8, {300, 1, 2, 255}, "hot rows at the ends", true, Spacing::kRecords);
  check_batch(8, {}, "no rows", false, Spacing::kOdd);
  check_batch(8, {0, 0, 0, 0}, "no lookups", false, Spacing::kOdd);
  check_batch(8, std::vector<int32_t>(30, 130), "hot rows only", true, Spacing::kRecords);
  for (const int64_t dim : {1, 4, 20}) {
    for (const int64_t gradients : {3, 64, 65, 200}) {  // a launch accepts at most 64
      check_batch(dim, with_hot_rows(short_rows(60), around_chunks), "several gradients, hot rows",
                  gradients % 2 == 0, dim == 4 ? Spacing::kRecords : Spacing::kOdd, gradients);
    }
  }
  check_batch(132, short_rows(17), "several gradients", true, Spacing::kOdd, 5);
  check_batch(8, {0, 0, 0, 0}, "several gradients, no lookups", false, Spacing::kOdd, 5);
  return check_result();
}
