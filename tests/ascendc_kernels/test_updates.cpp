// Checks that update_rows and accumulate_rows on emulated vector cores are bit-identical to the CPU kernels.
#include "op_kernels/common/aggregate.h"
#include "tests/ascendc_kernels/update_batch.h"

using ascendc_tests::Batch;
using ascendc_tests::check_accumulate;
using ascendc_tests::check_update;
using ascendc_tests::kOptimizers;
using ascendc_tests::OptimizerCase;
using kernel_tests::Cache;
using kernel_tests::Random;
using kernel_tests::short_rows;
using kernel_tests::States;
using kernel_tests::with_hot_rows;
using kernel_tests::without_nans;
using rec_sdk::DType;

static_assert(rec_sdk::ascendc::kSumBlock == rec_sdk::REC_SDK_ISA::kBlock,
              "the order of summation is the CPU's");

namespace {

// Whether this run repeats the tests with other engine timings, which find missing waits, or with another
// chip, which has other instructions. Such faults depend little on optimizer, data type and number of cores,
// so a repeated run tests fewer combinations of them.
const bool kOnceMore =
    std::getenv("REC_SDK_EMULATED_ENGINES") != nullptr || std::getenv("REC_SDK_EMULATED_SOC") != nullptr;
Deal deal(kOnceMore ? 13 : 5);

std::string title_of(const char* name, int64_t dim, DType dtype, bool scaled, const char* rows) {
  return ascendc_tests::title_of(name, dim, dtype, scaled ? "scaled, " : "") + rows;
}

void check_all(int64_t dim, const std::vector<int32_t>& lengths, const char* rows,
               const std::vector<int64_t>& all_cores) {
  Random random(dim);
  for (const bool scaled : {false, true}) {
    const Batch batch(&random, dim, lengths, scaled);
    static size_t turn = 0;
    const std::vector<int64_t> cores =
        kOnceMore ? std::vector{all_cores[turn++ % all_cores.size()]} : all_cores;
    for (const OptimizerCase& optimizer : kOptimizers) {
      for (const DType dtype : kernel_tests::kDTypes) {
        if (!deal.next()) continue;
        const Cache cache(&random, batch.slots, dim, dtype, ascendc_tests::states_of(optimizer, dim));
        const std::string title = title_of(optimizer.name, dim, dtype, scaled, rows);
        check_update(batch, cache, optimizer, title, cores, ascendc_tests::check_bits<uint8_t>);
        if (optimizer.states.empty() || !scaled) continue;
        const Cache mixed(&random, batch.slots, dim, dtype, ascendc_tests::states_of(optimizer, dim),
                          States::kMixed);
        check_update(batch, mixed, optimizer, title + " mixed states", {cores.back()},
                     ascendc_tests::check_bits<uint8_t>);
      }
    }
    check_accumulate(batch, &random, title_of("accumulate", dim, DType::kFloat32, scaled, rows), cores);
  }
}

void check_split(int64_t dim, const std::vector<int32_t>& lengths, int64_t gradients, bool scaled) {
  Random random(dim);
  Batch batch(&random, dim, lengths, scaled);
  batch.split_gradient(&random, gradients);
  const std::string rows = std::to_string(gradients) + " gradients";
  for (const OptimizerCase& optimizer : kOptimizers) {
    if (!deal.next()) continue;
    const Cache cache(&random, batch.slots, dim, DType::kBFloat16, ascendc_tests::states_of(optimizer, dim));
    check_update(batch, cache, optimizer,
                 title_of(optimizer.name, dim, DType::kBFloat16, scaled, rows.c_str()), {1, 48},
                 ascendc_tests::check_bits<uint8_t>);
  }
  check_accumulate(batch, &random, title_of("accumulate", dim, DType::kFloat32, scaled, rows.c_str()), {7});
}

// Tests many widths of rows. The batch has rows with one lookup, a row with several lookups, and a row that
// is summed in chunks unless rows are very wide.
void check_widths() {
  Deal types(2), optimizers(7);
  for (const int64_t dim : ascendc_tests::widths()) {
    Random random(dim);
    const bool scaled = dim % 2 == 0;
    const Batch batch(&random, dim, {1, 33, 1, 0, dim <= 8192 ? 1100 : 3}, scaled);
    check_accumulate(batch, &random, title_of("accumulate", dim, DType::kFloat32, scaled, "any width"), {3});
    for (const DType dtype : kernel_tests::kDTypes) {
      if (!types.next()) continue;
      for (const OptimizerCase& optimizer : kOptimizers) {
        if (!optimizers.next()) continue;
        const Cache cache(&random, batch.slots, dim, dtype, ascendc_tests::states_of(optimizer, dim));
        check_update(batch, cache, optimizer, title_of(optimizer.name, dim, dtype, scaled, "any width"), {3},
                     ascendc_tests::check_bits<uint8_t>);
      }
    }
  }
}

// Whether the chip rounds subnormal quotients to 0, as the 950 does; the CPU keeps them.
constexpr bool kLosesSubnormalQuotients = REC_SDK_ASCENDC_ARCH == 3510;

// Returns whether the optimizer divides max_norm by a row's norm, or by the largest number if the norm is not
// finite.
bool bounds_norms(const OptimizerCase& optimizer) {
  const std::string name = optimizer.name;
  return name == "bounded_rowwise_adagrad" || name == "ensemble_rowwise_adagrad";
}

// Returns whether nonzero quotients of such numbers, of their squares and of their roots are normal numbers.
bool has_normal_quotients(float value) {
  const float magnitude = std::fabs(value);
  return !std::isfinite(value) || value == 0 || (magnitude > 0x1p-30f && magnitude < 0x1p30f);
}

void keep_normal_quotients(DType dtype, int64_t elements, uint8_t* block) {
  for (int64_t i = 0; i < elements; ++i) {
    const bool wide = dtype == DType::kFloat32;
    const float value = wide ? kernel_tests::read<float>(block, i)
                             : kernel_tests::value_of(kernel_tests::read<uint16_t>(block, i), dtype);
    if (has_normal_quotients(value)) continue;
    if (wide) {
      kernel_tests::write<uint32_t>(block, i, 0);
    } else {
      kernel_tests::write<uint16_t>(block, i, 0);
    }
  }
}

void keep_normal_quotients(Batch* batch, Cache* cache) {
  for (float& g : batch->grad) g = has_normal_quotients(g) ? g : 0;
  for (int64_t slot = 0; slot < cache->slots; ++slot) {
    const rec_sdk::RecordLayout& layout = cache->layout;
    uint8_t* const record = cache->bytes.data() + slot * layout.bytes;
    keep_normal_quotients(layout.weight_dtype, layout.dim, record);
    for (int64_t s = 0; s < layout.state_count; ++s) {
      keep_normal_quotients(layout.state_dtype[s], layout.state_elements[s], record + layout.state_offset[s]);
    }
  }
}

// Tests a row with huge weights: max_norm / norm is subnormal, so on the 950 the row becomes 0.
void check_lost_quotient(const OptimizerCase& optimizer) {
  Random random(1);
  const Batch batch(&random, 8, {1}, false);
  Cache cache(&random, batch.slots, 8, DType::kFloat32, ascendc_tests::states_of(optimizer, 8));
  for (int64_t slot = 0; slot < cache.slots; ++slot) {
    uint8_t* const record = cache.bytes.data() + slot * cache.layout.bytes;
    for (int64_t i = 0; i < 8; ++i) kernel_tests::write(record, i, 1e38f);
  }
  const int64_t updated = batch.unique_slots[0] * cache.layout.bytes;
  check_update(batch, cache, optimizer, optimizer.name, {1},
               [&](const std::string&, int64_t, const std::vector<uint8_t>& found,
                   const std::vector<uint8_t>& expected) {
                 CHECK(kernel_tests::read<float>(expected.data() + updated, 0) > 0.1f);
                 CHECK(kernel_tests::read<float>(found.data() + updated, 0) == 0);
               });
}

// Tests gradients, weights and states with special values, such as NaN and infinities.
void check_special_values(bool scaled, States states) {
  Random random(1);
  const int64_t dim = 20;
  Batch batch(&random, dim, short_rows(400), scaled);
  kernel_tests::add_special_values(&random, &batch);
  for (const OptimizerCase& optimizer : kOptimizers) {
    for (const DType dtype : kernel_tests::kDTypes) {
      if (!deal.next()) continue;
      Cache cache(&random, batch.slots, dim, dtype, ascendc_tests::states_of(optimizer, dim), states);
      kernel_tests::add_special_values(&random, &cache);
      if (kLosesSubnormalQuotients) {
        if (bounds_norms(optimizer)) continue;
        keep_normal_quotients(&batch, &cache);
      }
      const char* values = states == States::kMixed ? "special values, mixed states" : "special values";
      check_update(batch, cache, optimizer, title_of(optimizer.name, dim, dtype, scaled, values), {7},
                   [&](const std::string& title, int64_t cores, const std::vector<uint8_t>& found,
                       const std::vector<uint8_t>& expected) {
                     ascendc_tests::check_bits(title, cores, without_nans(cache.layout, found),
                                               without_nans(cache.layout, expected));
                   });
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t only = argc > 1 ? std::atoll(argv[1]) : 0;
  check_special_values(false, States::kFloats);
  check_special_values(true, States::kFloats);
  check_special_values(true, States::kMixed);
  for (const OptimizerCase& optimizer : kOptimizers) {
    if (kLosesSubnormalQuotients && bounds_norms(optimizer)) check_lost_quotient(optimizer);
  }
  for (const int64_t gradients : {3, 16, 17, 70}) {  // a launch accepts at most 16
    check_split(20, short_rows(200), gradients, gradients == 17);
    check_split(8, with_hot_rows(short_rows(100), {5000, 257, 513}), gradients, gradients == 16);
  }
  check_split(8, {0, 0, 0}, 4, false);
  for (const int64_t dim : ascendc_tests::kDims) {
    if (only > 0 && only != dim) continue;
    check_all(dim, {1}, "one row", {48});
    check_all(dim, short_rows(dim > 500 ? 30 : 400), "short rows", {1, 7, 48});
    if (dim > 500) continue;
    check_all(dim, with_hot_rows(short_rows(300), {1024, 1025, 5000, 256, 257, 511, 512, 513}), "hot rows",
              {5, 48});
  }
  if (only == 0 && !kOnceMore) check_widths();
  if (only == 0 || only == 64) {
    check_all(64, with_hot_rows(short_rows(100), {70000}), "a very hot row", {48});
    check_all(1000, with_hot_rows(short_rows(20), {5000}), "a hot row", {48});
    check_all(8, {0, 0, 0, 0}, "no lookups", {48});
    check_all(8, std::vector<int32_t>(300, 130), "hot rows alone", {3});
    check_all(16, with_hot_rows(short_rows(5000), {300, 3000, 129, 128, 1000}), "many rows", {3, 48});
    // In the first case, tiles have more than 8 rows, whose blocks an instruction reads in groups of 8. In
    // the second case, tiles are read row by row.
    check_all(264, short_rows(100), "wide rows", {1});
    check_all(2056, short_rows(20), "very wide rows", {1});
  }
  return check_result();
}
