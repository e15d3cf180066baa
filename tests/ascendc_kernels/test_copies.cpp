// Tests of gather_rows, scatter_rows and swap_rows.
#include "tests/ascendc_kernels/row_kernels.h"

using ascendc_tests::check_bits;
using ascendc_tests::kernel_of;
using kernel_tests::distinct_slots;
using kernel_tests::Random;
using kernel_tests::random_bytes;

namespace {

void check_copies(int64_t bytes, int64_t count) {
  Random random(bytes);
  const int64_t slots = count + 10;
  const std::vector<int32_t> list = distinct_slots(&random, count, slots);
  const std::vector<uint8_t> cache = random_bytes(&random, slots * bytes),
                             rows = random_bytes(&random, count * bytes);
  const auto slice = [&](auto* data, int64_t i) { return data + i * bytes; };

  std::vector<uint8_t> gathered(rows.size()), scattered = cache;
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(slice(gathered.data(), i), slice(cache.data(), list[i]), static_cast<size_t>(bytes));
    std::memcpy(slice(scattered.data(), list[i]), slice(rows.data(), i), static_cast<size_t>(bytes));
  }
  for (const int64_t cores : ascendc_tests::kCores) {
    std::vector<uint8_t> target = cache, out(rows.size()), from = rows;
    const rec_sdk::CopyRows gather{target.data(), out.data(), list.data(), bytes, slots, count};
    const std::string title = "gather_rows of " + std::to_string(bytes) + " bytes";
    ascendc_tests::gather(gather).run(cores, title);
    check_bits(title, cores, out, gathered);
    check_bits(title, cores, target, cache);

    const rec_sdk::CopyRows scatter{target.data(), from.data(), list.data(), bytes, slots, count};
    const std::string other = "scatter_rows of " + std::to_string(bytes) + " bytes";
    ascendc_tests::scatter(scatter).run(cores, other);
    check_bits(other, cores, target, scattered);
    check_bits(other, cores, from, rows);
  }
}

// Functions that return whether the slot of row i has a victim: never, always, or for some rows.
constexpr bool (*kLeaves[])(int64_t i, int64_t count) = {
    [](int64_t, int64_t) { return false; },
    [](int64_t, int64_t) { return true; },
    [](int64_t i, int64_t) { return i % 3 == 1; },
    [](int64_t i, int64_t count) { return i > count / 3; },
    [](int64_t i, int64_t count) { return i < count / 2 || i % 1024 == 1023; },
};

void check_swap(int64_t bytes, int64_t count) {
  Random random(bytes);
  const int64_t slots = count + 10;
  const std::vector<int32_t> list = distinct_slots(&random, count, slots);
  const std::vector<uint8_t> cache = random_bytes(&random, slots * bytes),
                             rows = random_bytes(&random, count * bytes);
  for (const auto leaves : kLeaves) {
    std::vector<int32_t> victim_indices;
    std::vector<uint8_t> swapped = cache, left;
    int32_t victims = 0;
    for (int64_t i = 0; i < count; ++i) {
      uint8_t* const row = &swapped[static_cast<size_t>(list[i] * bytes)];
      if (leaves(i, count)) left.insert(left.end(), row, row + bytes);
      victim_indices.push_back(leaves(i, count) ? victims++ : -1);
      std::memcpy(row, &rows[static_cast<size_t>(i * bytes)], static_cast<size_t>(bytes));
    }
    for (const int64_t cores : ascendc_tests::kCores) {
      std::vector<uint8_t> target = cache, out(left.size());
      const rec_sdk::SwapRows swap{target.data(), rows.data(), out.data(), list.data(), victim_indices.data(),
                                   bytes,         slots,       count,      victims};
      const std::string title = "swap_rows of " + std::to_string(bytes) + " bytes";
      kernel_of(swap).run(cores, title);
      check_bits(title, cores, out, left);
      check_bits(title, cores, target, swapped);
    }
  }
}

}  // namespace

int main() {
  for (const int64_t bytes : {1, 16, 31, 48, 112, 528, 1552, 4112}) {
    check_copies(bytes, 1);
    check_copies(bytes, std::min<int64_t>(2500, 400000 / bytes));
    check_swap(bytes, 1);
    check_swap(bytes, std::min<int64_t>(2500, 400000 / bytes));
  }
  for (const int64_t bytes : {65536, 65552, 200016}) {
    check_copies(bytes, 5);
    check_swap(bytes, 5);
  }
  for (const int64_t dim : ascendc_tests::widths()) {
    for (const int64_t bytes : {2 * dim, 4 * dim + 64}) {
      check_copies(bytes, 4);
      check_swap(bytes, 4);
    }
  }
  return check_result();
}
