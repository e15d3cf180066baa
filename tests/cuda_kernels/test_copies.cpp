// Tests of gather_rows, scatter_rows and swap_rows.
#include "tests/cuda_kernels/support.h"

using cuda_tests::check_bits;
using cuda_tests::in_every_order;
using kernel_tests::Random;

namespace {

// A cache of records, and a buffer of rows. Both start `offset` bytes after a multiple of 16, and victims
// start `victims_offset` bytes after a multiple of 16.
struct Copies {
  int64_t bytes, slots, count, offset, victims_offset;
  std::vector<int32_t> list;
  std::vector<int32_t> victim_indices;  // two of three slots have a victim
  std::vector<uint8_t> cache, rows;

  Copies(Random* random, int64_t bytes_, int64_t count_, int64_t offset_, int64_t victims_offset_)
      : bytes(bytes_),
        slots(count_ + 10),
        count(count_),
        offset(offset_),
        victims_offset(victims_offset_),
        list(kernel_tests::distinct_slots(random, count, slots)),
        cache(kernel_tests::random_bytes(random, offset + slots * bytes)),
        rows(kernel_tests::random_bytes(random, offset + count * bytes)) {
    for (int32_t i = 0; i < count; ++i) victim_indices.push_back(i % 3 == 2 ? -1 : i - i / 3);
  }

  rec_sdk::CopyRows arguments(std::vector<uint8_t>* to_cache, std::vector<uint8_t>* to_rows) const {
    return {to_cache->data() + offset, to_rows->data() + offset, list.data(), bytes, slots, count};
  }
  rec_sdk::SwapRows swap(std::vector<uint8_t>* to_cache, std::vector<uint8_t>* to_victims) const {
    return {to_cache->data() + offset,
            rows.data() + offset,
            to_victims->data() + victims_offset,
            list.data(),
            victim_indices.data(),
            bytes,
            slots,
            count,
            count - count / 3};
  }
};

void check(const Copies& copies, const std::string& title) {
  std::vector<uint8_t> gathered = copies.rows, scattered = copies.cache, cache = copies.cache,
                       rows = copies.rows;
  rec_sdk::cpu_kernels().gather_rows(copies.arguments(&cache, &gathered), 0, copies.count);
  rec_sdk::cpu_kernels().scatter_rows(copies.arguments(&scattered, &rows), 0, copies.count);
  in_every_order("gather_rows, " + title, [&](const std::string& where) {
    std::vector<uint8_t> from = copies.cache, out = copies.rows;
    CHECK(rec_sdk::cuda::gather_rows(copies.arguments(&from, &out), nullptr) == cudaSuccess);
    check_bits(where, out, gathered);
    check_bits(where, from, copies.cache);
  });
  in_every_order("scatter_rows, " + title, [&](const std::string& where) {
    std::vector<uint8_t> to = copies.cache, from = copies.rows;
    CHECK(rec_sdk::cuda::scatter_rows(copies.arguments(&to, &from), nullptr) == cudaSuccess);
    check_bits(where, to, scattered);
    check_bits(where, from, copies.rows);
  });
}

void check_swap(const Copies& copies, const std::string& title) {
  std::vector<uint8_t> swapped = copies.cache, left(copies.victims_offset + copies.count * copies.bytes);
  rec_sdk::cpu_kernels().swap_rows(copies.swap(&swapped, &left), 0, copies.count);
  in_every_order("swap_rows, " + title, [&](const std::string& where) {
    std::vector<uint8_t> cache = copies.cache, victims(left.size());
    CHECK(rec_sdk::cuda::swap_rows(copies.swap(&cache, &victims), nullptr) == cudaSuccess);
    check_bits(where, cache, swapped);
    check_bits(where, victims, left);
  });
}

void check_copies(int64_t bytes, int64_t count, int64_t offset, int64_t victims_offset) {
  Random random(bytes + offset);
  const Copies copies(&random, bytes, count, offset, victims_offset);
  const std::string title = std::to_string(count) + " rows of " + std::to_string(bytes) + " bytes at " +
                            std::to_string(offset) + ", victims to " + std::to_string(victims_offset);
  check(copies, title);
  check_swap(copies, title);
  cuda_host::memory_type = cudaMemoryTypeHost;
  check(copies, title + " in pinned memory");
  check_swap(copies, title + " in pinned memory");
  cuda_host::memory_type = cudaMemoryTypeDevice;
}

}  // namespace

int main() {
  for (const int64_t bytes : {1, 2, 4, 16, 31, 36, 48, 112, 528, 1552, 4112}) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, std::min<int64_t>(1500, 60000 / bytes)}) {
      check_copies(bytes, count, 0, 0);
    }
  }
  for (const int64_t offset : {1, 4, 8}) {
    check_copies(48, 100, offset, offset);
    check_copies(48, 100, 0, offset);
    check_copies(48, 100, offset, 0);
  }
  for (const int64_t bytes : {65536, 65552, 200016}) check_copies(bytes, 5, 0, 0);
  return check_result();
}
