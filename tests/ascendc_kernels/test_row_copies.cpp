// Tests that one copy instruction transfers a pair of rows: checks the number of copies, and rows that are
// too far apart to share a copy.
#include <sys/mman.h>

#include <numeric>

#include "tests/ascendc_kernels/costs.h"
#include "tests/ascendc_kernels/row_kernels.h"

using ascendc_tests::check_bits;
using ascendc_tests::gather;
using ascendc_tests::kernel_of;
using ascendc_tests::scatter;
using rec_sdk::DType;

namespace {

constexpr int64_t kCores = 4;

struct Copies {
  int64_t in, out;
};

Copies copies_of(const ascendc_tests::Kernel& kernel) {
  rec_sdk_emulator_reset_counters();
  kernel.run(kCores);
  const std::string counters = rec_sdk_emulator_counters();
  const auto sum = [&](const char* name) {
    const std::vector<int64_t> each = ascendc_tests::counter(counters, kernel.name, name);
    return std::accumulate(each.begin(), each.end(), int64_t{0});
  };
  return {sum("mte2_instructions"), sum("mte3_instructions")};
}

// Checks that the number of copies is `least`, the number for the rows, plus at most kOthers other copies.
void check_count(const std::string& title, int64_t copies, int64_t least) {
  // Copies of slots, offsets and gradients, and of the last row in tiles with an odd number of rows.
  constexpr int64_t kOthers = 150;
  std::printf("%s: %lld copies, at least %lld for the rows\n", title.c_str(), static_cast<long long>(copies),
              static_cast<long long>(least));
  CHECK(copies >= least && copies <= least + kOthers);
}

// Checks the number of copies by each kernel; `copies` is the number that the rows need in the order of
// `slots`.
void check_counts(const std::string& title, const std::vector<int32_t>& slots, int64_t copies) {
  constexpr int64_t kDim = 24, kBag = 5;
  const auto count = static_cast<int64_t>(slots.size());
  kernel_tests::Random random(1);
  const kernel_tests::Cache cache(&random, count, kDim, DType::kFloat32, {kDim});
  const rec_sdk::Weights weights = cache.weights();
  std::vector<float> out(static_cast<size_t>(count * kDim));
  const rec_sdk::LookupSequence sequence{weights, slots.data(), out.data(), count};
  check_count(title + "lookup_sequence", copies_of(kernel_of(sequence)).in, copies);

  std::vector<int64_t> offsets;
  for (int64_t first = 0; first <= count; first += kBag) offsets.push_back(first);
  const int64_t columns[] = {0}, bags = count / kBag;
  const bool mean[] = {false};
  const rec_sdk::Bags all{offsets.data(), bags, 0, bags, columns, mean, 1};
  const rec_sdk::LookupPooled pooled{weights, slots.data(), nullptr, all, out.data(), kDim, kDim, count};
  check_count(title + "lookup_pooled", copies_of(kernel_of(pooled)).in, copies);
  std::vector<float> weights_grad(slots.size());
  const rec_sdk::PooledWeightsGrad grad{weights, slots.data(),        all,  out.data(),
                                        kDim,    weights_grad.data(), kDim, count};
  check_count(title + "pooled_weights_grad", copies_of(kernel_of(grad)).in, copies);

  const int64_t bytes = weights.stride_bytes;
  std::vector<uint8_t> table(static_cast<size_t>(count * bytes)), rows(table.size()), victims(table.size());
  const rec_sdk::CopyRows copy{table.data(), rows.data(), slots.data(), bytes, count, count};
  check_count(title + "gather_rows", copies_of(gather(copy)).in, copies);
  check_count(title + "scatter_rows", copies_of(scatter(copy)).out, copies);
  std::vector<int32_t> victim_indices(slots.size());
  std::iota(victim_indices.begin(), victim_indices.end(), 0);
  const rec_sdk::SwapRows swap{table.data(), rows.data(), victims.data(), slots.data(), victim_indices.data(),
                               bytes,        count,       count,          count};
  const Copies swapped = copies_of(kernel_of(swap));
  check_count(title + "swap_rows, in", swapped.in, copies);
  check_count(title + "swap_rows, out", swapped.out, copies);
}

// A large range of memory; only pages that are written take physical memory.
class Sparse {
 public:
  explicit Sparse(int64_t bytes)
      : bytes_(static_cast<size_t>(bytes)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                   0)) {
    CHECK(data_ != MAP_FAILED);
  }
  ~Sparse() { munmap(data_, bytes_); }
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

// A copy has 31 bits for the gap between two rows. Rows at neighbouring slots share a copy; more distant rows
// do not.
void check_far_rows() {
  constexpr int64_t kDim = 16, kSlots = 4, kPitch = int64_t{5} << 28;
  const Sparse memory(kSlots * kPitch);
  for (int64_t s = 0; s < kSlots; ++s) {
    for (int64_t c = 0; c < kDim; ++c) {
      reinterpret_cast<float*>(memory.data() + s * kPitch)[c] = static_cast<float>(100 * s + c);
    }
  }
  const std::vector<int32_t> slots{0, 2, 0, 1, 3, 0, 1, 2, 1, 3, 2, 2, 0, 3, 2, 3, 1};
  const auto count = static_cast<int64_t>(slots.size());
  std::vector<float> expected;
  for (const int32_t s : slots) {
    for (int64_t c = 0; c < kDim; ++c) expected.push_back(static_cast<float>(100 * s + c));
  }
  std::vector<float> out(expected.size());
  const rec_sdk::LookupSequence a{
      {memory.data(), kPitch, kSlots, kDim, DType::kFloat32}, slots.data(), out.data(), count};
  kernel_of(a).run(1);
  check_bits("rows far from each other", 1, out, expected);
}

// Gradients of neighbouring bags share a copy unless the gap between them has more than 31 bits.
void check_far_gradients() {
  constexpr int64_t kDim = 16, kBags = 3, kBag = 2, kStride = int64_t{5} << 27;
  const Sparse memory(kBags * kStride * static_cast<int64_t>(sizeof(float)));
  auto* const grad = reinterpret_cast<float*>(memory.data());
  std::vector<float> weights, expected;
  const std::vector<int32_t> slots{0, 1, 2, 1, 0, 2};
  for (int64_t i = 0; i < 3 * kDim; ++i) weights.push_back(static_cast<float>(i));
  for (int64_t b = 0; b < kBags; ++b) {
    for (int64_t c = 0; c < kDim; ++c) grad[b * kStride + c] = static_cast<float>(b + c);
  }
  for (int64_t i = 0; i < kBags * kBag; ++i) {
    float sum = 0;  // the terms are whole numbers, so the sum is exact in every order
    for (int64_t c = 0; c < kDim; ++c) sum += weights[slots[i] * kDim + c] * grad[i / kBag * kStride + c];
    expected.push_back(sum);
  }
  const int64_t offsets[] = {0, 2, 4, 6}, columns[] = {0};
  const bool mean[] = {false};
  std::vector<float> out(slots.size());
  const rec_sdk::PooledWeightsGrad a{
      {reinterpret_cast<uint8_t*>(weights.data()), kDim * 4, 3, kDim, DType::kFloat32},
      slots.data(),
      {offsets, kBags, 0, kBags, columns, mean, 1},
      grad,
      kStride,
      out.data(),
      kDim,
      kBags * kBag};
  kernel_of(a).run(1);
  check_bits("gradients far from each other", 1, out, expected);
}

}  // namespace

int main() {
  constexpr int32_t kRows = 5000;
  std::vector<int32_t> slots(kRows);
  std::iota(slots.begin(), slots.end(), 0);
  check_counts("ascending, ", slots, kRows / 2);
  std::reverse(slots.begin(), slots.end());
  check_counts("descending, ", slots, kRows);
  check_far_rows();
  check_far_gradients();
  return check_result();
}
