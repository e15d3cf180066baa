// Checks that swap_lookup_sequence and swap_lookup_pooled are bit-identical to a swap followed by lookups on
// the CPU.
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

constexpr int64_t kSlots = Table::kSlots;

// Which slots of fetched rows have a victim. With kNone, `victim_indices` is null.
enum class Victims { kNone, kAll, kSome };
constexpr Victims kVictims[] = {Victims::kNone, Victims::kAll, Victims::kSome};

// A cache before and after a swap.
struct Swap {
  int64_t count, bytes;
  std::vector<uint8_t> before, after, rows, left;
  std::vector<int32_t> slots, victim_indices;
  rec_sdk::Weights weights;  // weights in the cache `after`

  // Swaps random slots, but never the last slot.
  Swap(Random* random, const Table& table, int64_t count_, Victims victims)
      : count(count_), bytes(table.weights.stride_bytes), weights(table.weights) {
    before = table.bytes;
    before.resize(static_cast<size_t>(kSlots * bytes));
    const Table others(random, weights.dim, weights.dtype, Spacing::kRecords);
    rows = others.bytes;
    rows.resize(static_cast<size_t>(count * bytes));
    slots = kernel_tests::distinct_slots(random, count, kSlots - 1);
    after = before;
    for (int64_t i = 0; i < count; ++i) {
      const bool leaves = victims == Victims::kAll || (victims == Victims::kSome && i % 3 != 1);
      uint8_t* const row = &after[static_cast<size_t>(slots[i] * bytes)];
      victim_indices.push_back(leaves ? static_cast<int32_t>(left.size() / static_cast<size_t>(bytes)) : -1);
      if (leaves) left.insert(left.end(), row, row + bytes);
      std::memcpy(row, &rows[static_cast<size_t>(i * bytes)], static_cast<size_t>(bytes));
    }
    if (victims == Victims::kNone) victim_indices.clear();
    weights.data = after.data();
  }

  std::vector<int32_t> origins_of(const std::vector<int32_t>& lookups) const {
    std::vector<int32_t> of_slot(static_cast<size_t>(kSlots));
    std::iota(of_slot.begin(), of_slot.end(), 0);
    for (int64_t i = 0; i < count; ++i) of_slot[slots[i]] = static_cast<int32_t>(kSlots + i);
    std::vector<int32_t> origins;
    for (const int32_t slot : lookups) origins.push_back(of_slot[slot]);
    return origins;
  }

  rec_sdk::SwapRows arguments(std::vector<uint8_t>* cache, std::vector<uint8_t>* out) const {
    return {cache->data(),
            rows.data(),
            out->data(),
            slots.data(),
            victim_indices.empty() ? nullptr : victim_indices.data(),
            bytes,
            kSlots,
            count,
            static_cast<int64_t>(left.size()) / bytes};
  }

  // Calls call(weights, arguments of the swap), which must run a kernel, and checks the victims and the cache
  // after it.
  template <class Call>
  void check(const std::string& title, int64_t cores, const Call& call) const {
    std::vector<uint8_t> cache = before, out(left.size());
    rec_sdk::Weights in_cache = weights;
    in_cache.data = cache.data();
    call(in_cache, arguments(&cache, &out));
    check_bits(title + ", victims", cores, out, left);
    check_bits(title + ", cache", cores, cache, after);
  }
};

// Puts pairs of lookups into the batch whose origins are adjacent numbers, but whose rows are not adjacent in
// memory: the last slot and the first fetched row.
void put_neighbours(const Swap& swap, std::vector<int32_t>* lookups) {
  for (size_t j = 4; j + 1 < lookups->size() && j < 8 && swap.count > 0; j += 2) {
    (*lookups)[j] = static_cast<int32_t>(kSlots - 1);
    (*lookups)[j + 1] = swap.slots[0];
  }
}

void check_sequence(int64_t dim, DType dtype, int64_t lookups, int64_t coming, Victims victims) {
  Random random(dim + lookups);
  const Table table(&random, dim, dtype, Spacing::kRecords);
  const Swap swap(&random, table, coming, victims);
  std::vector<int32_t> slots = random_slots(&random, lookups, kSlots);
  put_neighbours(swap, &slots);
  const std::vector<int32_t> origins = swap.origins_of(slots);
  std::vector<float> expected(static_cast<size_t>(lookups * dim));
  rec_sdk::cpu_kernels().lookup_sequence({swap.weights, slots.data(), expected.data(), lookups}, 0, lookups);
  for (const int64_t cores : kCores) {
    const std::string title = title_of("swap_lookup_sequence", dim, dtype);
    std::vector<float> found(expected.size());
    swap.check(title, cores, [&](const rec_sdk::Weights& weights, const rec_sdk::SwapRows& rows) {
      const rec_sdk::SwapLookupSequence a{
          rows, {weights, slots.data(), found.data(), lookups}, origins.data()};
      kernel_of(a).run(cores, title);
    });
    check_bits(title, cores, found, expected);
  }
}

void check_pooled(int64_t dim, DType dtype, const BagShape& shape, bool weighted, Victims victims) {
  Random random(dim);
  LookupBatch batch(&random, dim, dtype, shape, Spacing::kRecords);
  const Swap swap(&random, batch.table, 20, victims);
  put_neighbours(swap, &batch.slots);
  const std::vector<int32_t> origins = swap.origins_of(batch.slots);
  std::vector<float> expected = batch.blank_output();
  rec_sdk::LookupPooled behind = batch.pooled(weighted, &expected);
  behind.weights = swap.weights;
  rec_sdk::cpu_kernels().lookup_pooled(behind, 0, batch.bag_count);
  for (const int64_t cores : kCores) {
    const std::string title = title_of("swap_lookup_pooled", dim, dtype, shape.name);
    std::vector<float> found = batch.blank_output();
    swap.check(title, cores, [&](const rec_sdk::Weights& weights, const rec_sdk::SwapRows& rows) {
      rec_sdk::SwapLookupPooled a{rows, batch.pooled(weighted, &found), origins.data()};
      a.lookup.weights = weights;
      kernel_of(a).run(cores, title);
    });
    check_bits(title, cores, found, expected);
  }
}

void check_both(int64_t dim, DType dtype) {
  const BagShape shapes[] = {
      {"mixed", 6, 2, {0, 1, 2, 31, 32, 33, scaled(100, dim), scaled(1100, dim), 5, scaled(64, dim)}},
      {"equal bags", 20, 0, std::vector<int64_t>(40, 8)}};
  for (const Victims victims : kVictims) {
    check_sequence(dim, dtype, scaled(3001, dim), 20, victims);
    for (const BagShape& shape : shapes) check_pooled(dim, dtype, shape, victims == Victims::kAll, victims);
  }
  check_sequence(dim, dtype, 1, 1, Victims::kAll);
  check_sequence(dim, dtype, 40, kSlots - 1, Victims::kAll);
  check_sequence(dim, dtype, 0, 3, Victims::kSome);
  check_sequence(dim, dtype, 5, 0, Victims::kAll);
}

void check_blocks() {
  using rec_sdk::ascendc::blocks_of;
  const rec_sdk::Weights weights{nullptr, 512, kSlots, 64, DType::kFloat32};
  rec_sdk::SwapLookupSequence a{};
  a.lookup.weights = weights;
  a.swap.bytes = 512;
  CHECK(blocks_of(a, 48) == 0);
  a.lookup.count = 1;
  CHECK(blocks_of(a, 48) == 1);
  a.swap.count = 100000;
  CHECK(blocks_of(a, 48) == 48);
  rec_sdk::SwapLookupPooled b{};
  b.swap.bytes = 512;
  CHECK(blocks_of(b, 48) == 0);
  b.swap.count = 1;
  CHECK(blocks_of(b, 48) == 1);
}

}  // namespace

int main() {
  check_blocks();
  for (const int64_t dim : {1, 8, 20, 64, 128, 200, 1000, 5000}) {
    for (const DType dtype : kernel_tests::kDTypes) check_both(dim, dtype);
  }
  check_sequence(30011, DType::kFloat32, 5, 3, Victims::kSome);
  check_sequence(30011, DType::kBFloat16, 5, 3, Victims::kSome);
  return check_result();
}
