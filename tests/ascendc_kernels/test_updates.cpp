// update_rows and accumulate_rows on emulated vector cores: the bits of the CPU kernels.
#include "op_kernels/common/aggregate.h"
#include "tests/ascendc_kernels/update_batch.h"

using ascendc_tests::Batch;
using ascendc_tests::check_accumulate;
using ascendc_tests::check_update;
using ascendc_tests::kOptimizers;
using ascendc_tests::OptimizerCase;
using kernel_tests::Cache;
using kernel_tests::Random;
using rec_sdk::DType;

static_assert(rec_sdk::ascendc::kSumBlock == rec_sdk::REC_SDK_ISA::kBlock,
              "the order of summation is the CPU's");

namespace {

// Empty, single, of several blocks; `rows` rows that repeat them.
std::vector<int32_t> short_rows(int64_t rows) {
  const std::vector<int32_t> pattern = {1, 0, 2, 1, 1, 31, 1, 33, 1, 1, 3, 100, 1, 0, 0, 1, 2};
  std::vector<int32_t> lengths;
  for (int64_t u = 0; u < rows; ++u) lengths.push_back(pattern[u % pattern.size()]);
  return lengths;
}

// With hot rows next to each other, at borders of windows, and with rests of all kinds.
std::vector<int32_t> with_hot_rows(std::vector<int32_t> lengths, const std::vector<int32_t>& hot) {
  const int64_t step = static_cast<int64_t>(lengths.size()) / static_cast<int64_t>(hot.size() + 1);
  for (size_t i = 0; i < hot.size(); ++i) {
    lengths[static_cast<size_t>(step) * (i + 1)] = hot[i];
    if (i % 3 == 2) lengths[static_cast<size_t>(step) * (i + 1) + 1] = 257;
  }
  return lengths;
}

std::string title_of(const char* name, int64_t dim, DType dtype, bool scaled, const char* rows) {
  return ascendc_tests::title_of(name, dim, dtype, scaled ? "scaled, " : "") + rows;
}

void check_all(int64_t dim, const std::vector<int32_t>& lengths, const char* rows,
               const std::vector<int64_t>& cores) {
  Random random(dim);
  for (const bool scaled : {false, true}) {
    const Batch batch(&random, dim, lengths, scaled);
    for (const OptimizerCase& optimizer : kOptimizers) {
      for (const DType dtype : kernel_tests::kDTypes) {
        const Cache cache(&random, batch.slots, dim, dtype, ascendc_tests::states_of(optimizer, dim));
        check_update(batch, cache, optimizer, title_of(optimizer.name, dim, dtype, scaled, rows), cores,
                     ascendc_tests::check_bits<uint8_t>);
      }
    }
    check_accumulate(batch, &random, title_of("accumulate", dim, DType::kFloat32, scaled, rows), cores);
  }
}

// The sign and payload of a NaN depend on the order of the operands, which a compiler may change.
void without_nans(const rec_sdk::RecordLayout& layout, std::vector<uint8_t>* bytes) {
  for (uint8_t* record = bytes->data(); record < bytes->data() + bytes->size(); record += layout.bytes) {
    for (int64_t i = 0; i < layout.weight_bytes / 2 && layout.weight_dtype != DType::kFloat32; ++i) {
      const auto bits = kernel_tests::read<uint16_t>(record, i);
      if (std::isnan(kernel_tests::value_of(bits, layout.weight_dtype)))
        kernel_tests::write<uint16_t>(record, i, 0xffff);
    }
    const int64_t floats = layout.weight_dtype == DType::kFloat32 ? 0 : layout.state_offset[0] / 4;
    for (int64_t i = floats; i < layout.bytes / 4 && (layout.state_count > 0 || floats == 0); ++i) {
      if (std::isnan(kernel_tests::read<float>(record, i)))
        kernel_tests::write<uint32_t>(record, i, 0xffffffff);
    }
  }
}

// Gradients, weights and states that are not numbers, infinite, subnormal or too large for 16 bits.
void check_special_values(bool scaled) {
  const float specials[] = {NAN,   INFINITY, -INFINITY, 1e-40f,    -3e-45f, 0.0f,
                            -0.0f, 70000.0f, 3e38f,     -65519.9f, 6e-8f};
  Random random(1);
  const int64_t dim = 20;
  Batch batch(&random, dim, short_rows(400), scaled);
  for (float& g : batch.grad) {
    if (random.below(20) == 0) g = specials[random.below(11)];
  }
  for (const OptimizerCase& optimizer : kOptimizers) {
    for (const DType dtype : kernel_tests::kDTypes) {
      Cache cache(&random, batch.slots, dim, dtype, ascendc_tests::states_of(optimizer, dim));
      const int64_t values = static_cast<int64_t>(cache.bytes.size()) / 2;
      for (int64_t i = 0; i < values; ++i) {
        if (random.below(20) == 0)
          kernel_tests::write(cache.bytes.data(), i, static_cast<uint16_t>(random.bits()));
      }
      check_update(batch, cache, optimizer, title_of(optimizer.name, dim, dtype, scaled, "special values"),
                   {7},
                   [&](const std::string& title, int64_t cores, std::vector<uint8_t> found,
                       std::vector<uint8_t> expected) {
                     without_nans(cache.layout, &found);
                     without_nans(cache.layout, &expected);
                     ascendc_tests::check_bits(title, cores, found, expected);
                   });
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t only = argc > 1 ? std::atoll(argv[1]) : 0;
  check_special_values(false);
  check_special_values(true);
  for (const int64_t dim : ascendc_tests::kDims) {
    if (only > 0 && only != dim) continue;
    check_all(dim, {1}, "one row", {48});
    check_all(dim, short_rows(dim > 500 ? 60 : 400), "short rows", {1, 7, 48});
    if (dim > 500) continue;
    check_all(dim, with_hot_rows(short_rows(300), {1024, 1025, 5000, 256, 257, 511, 512, 513}), "hot rows",
              {5, 48});
  }
  if (only == 0 || only == 64) {
    check_all(64, with_hot_rows(short_rows(100), {70000}), "a very hot row", {48});
    check_all(1000, with_hot_rows(short_rows(20), {5000}), "a hot row", {48});
    check_all(8, {0, 0, 0, 0}, "no lookups", {48});
    check_all(8, std::vector<int32_t>(300, 130), "more hot rows than are listed at a time", {3});
    check_all(16, with_hot_rows(short_rows(20000), {300, 3000, 129, 128, 1000}), "many rows", {3, 48});
  }
  return check_result();
}
