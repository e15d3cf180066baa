// Every kernel on rows of any width up to 100,000: the bits of the CPU kernels, and no tile that does not
// fit.
#include "emulator/kernels/lookup_buffers.h"
#include "op_kernels/gather_rows/ascendc.h"
#include "op_kernels/lookup_pooled/ascendc.h"
#include "op_kernels/lookup_sequence/ascendc.h"
#include "op_kernels/pooled_weights_grad/ascendc.h"
#include "op_kernels/scatter_rows/ascendc.h"
#include "op_kernels/swap_rows/ascendc.h"
#include "tests/ascendc_kernels/update_batch.h"
#include "tests/kernels/lookup_batch.h"

using ascendc_tests::Batch;
using ascendc_tests::check_bits;
using ascendc_tests::OptimizerCase;
using ascendc_tests::title_of;
using kernel_tests::Cache;
using kernel_tests::LookupBatch;
using kernel_tests::Random;
using kernel_tests::Spacing;
using rec_sdk::DType;

namespace {

constexpr int64_t kCores = 3;

// In full tests also widths 10 in 100 apart, each with its neighbours.
std::vector<int64_t> widths() {
  if (!full_tests()) return {7, 129, 8193, 42503, 100000};
  std::vector<int64_t> list;
  for (int64_t width = 1; width <= 100000; width += 1 + width / 10) {
    for (int64_t near = width - 1; near <= width + 1; ++near) list.push_back(std::max<int64_t>(1, near));
  }
  list.push_back(100000);
  return list;
}

void check_lookups(int64_t dim, DType dtype) {
  Random random(dim);
  const LookupBatch batch(&random, dim, dtype, {"bags", 2, 0, {3, 1, 0, 5}}, Spacing::kOdd);
  std::vector<float> found(static_cast<size_t>(batch.lookups() * dim));
  const rec_sdk::LookupSequence sequence{batch.table.weights, batch.slots.data(), found.data(),
                                         batch.lookups()};
  const std::string title = title_of("lookup_sequence", dim, dtype);
  ascendc_tests::run(title, kCores, rec_sdk::emulator::buffers_of(sequence),
                     [&] { rec_sdk::ascendc::lookup_sequence(sequence); });
  check_bits(title, kCores, found, kernel_tests::sequence_on_cpu(batch.table, batch.slots));

  for (const bool weighted : {false, true}) {
    std::vector<float> out = batch.blank_output();
    const rec_sdk::LookupPooled pooled = batch.pooled(weighted, &out);
    const std::string name = title_of(weighted ? "lookup_pooled weighted" : "lookup_pooled", dim, dtype);
    ascendc_tests::run(name, kCores, rec_sdk::emulator::buffers_of(pooled),
                       [&] { rec_sdk::ascendc::lookup_pooled(pooled); });
    check_bits(name, kCores, out, batch.pooled_on_cpu(weighted));
  }

  std::vector<float> products(static_cast<size_t>(batch.lookups()));
  const rec_sdk::PooledWeightsGrad grad = batch.weights_grad(&products);
  const std::string name = title_of("pooled_weights_grad", dim, dtype);
  ascendc_tests::run(name, kCores, rec_sdk::emulator::buffers_of(grad),
                     [&] { rec_sdk::ascendc::pooled_weights_grad(grad); });
  check_bits(name, kCores, products, batch.weights_grad_on_cpu());
}

// Rows that leave the cache's first slots, others that come there, and both again.
void check_moves(int64_t bytes) {
  constexpr int64_t kSlots = 6, kRows = 4;
  Random random(bytes);
  const std::vector<uint8_t> before = kernel_tests::random_bytes(&random, kSlots * bytes),
                             incoming = kernel_tests::random_bytes(&random, kRows * bytes);
  const std::vector<int32_t> slots{0, 1, 2, 3}, places{0, 1, 2, 3};
  const std::vector<uint8_t> outgoing(before.begin(), before.begin() + kRows * bytes);
  std::vector<uint8_t> after = before;
  std::copy(incoming.begin(), incoming.end(), after.begin());

  std::vector<uint8_t> cache = before, rows(outgoing.size()), from = incoming;
  const std::string title = "rows of " + std::to_string(bytes) + " bytes";
  const rec_sdk::CopyRows gather{cache.data(), rows.data(), slots.data(), bytes, kSlots, kRows};
  ascendc_tests::run(title, kCores, rec_sdk::emulator::gather_buffers(gather),
                     [&] { rec_sdk::ascendc::gather_rows(gather); });
  check_bits("gather_rows, " + title, kCores, rows, outgoing);
  const rec_sdk::CopyRows scatter{cache.data(), from.data(), slots.data(), bytes, kSlots, kRows};
  ascendc_tests::run(title, kCores, rec_sdk::emulator::scatter_buffers(scatter),
                     [&] { rec_sdk::ascendc::scatter_rows(scatter); });
  check_bits("scatter_rows, " + title, kCores, cache, after);

  cache = before;
  std::fill(rows.begin(), rows.end(), uint8_t{0});
  const rec_sdk::SwapRows swap{cache.data(), from.data(), rows.data(), slots.data(), places.data(),
                               bytes,        kSlots,      kRows,       kRows};
  ascendc_tests::run(title, kCores, rec_sdk::emulator::buffers_of(swap),
                     [&] { rec_sdk::ascendc::swap_rows(swap); });
  check_bits("swap_rows, leaving, " + title, kCores, rows, outgoing);
  check_bits("swap_rows, " + title, kCores, cache, after);
}

// Single rows, one of some lookups, and one that is summed in chunks.
void check_updates(int64_t dim, DType dtype, Deal* deal) {
  Random random(dim);
  const Batch batch(&random, dim, {1, 33, 1, 0, dim <= 8192 ? 1100 : 3}, dim % 2 == 0);
  ascendc_tests::check_accumulate(batch, &random, title_of("accumulate", dim, DType::kFloat32), {kCores});
  for (const OptimizerCase& optimizer : ascendc_tests::kOptimizers) {
    if (!deal->next()) continue;
    const Cache cache(&random, batch.slots, dim, dtype, ascendc_tests::states_of(optimizer, dim));
    ascendc_tests::check_update(batch, cache, optimizer, title_of(optimizer.name, dim, dtype), {kCores},
                                ascendc_tests::check_bits<uint8_t>);
  }
}

}  // namespace

int main() {
  Deal types(2), optimizers(7);
  for (const int64_t dim : widths()) {
    check_moves(dim * 2);
    check_moves(dim * 4 + 64);
    for (const DType dtype : kernel_tests::kDTypes) {
      if (!types.next()) continue;
      check_lookups(dim, dtype);
      check_updates(dim, dtype, &optimizers);
    }
  }
  return check_result();
}
