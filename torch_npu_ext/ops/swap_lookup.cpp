// The operators swap_lookup_sequence and swap_lookup_pooled. On the CPU, each runs the kernel of the swap,
// then the kernel of the lookup.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "torch_npu_ext/ops/arguments.h"
#include "torch_npu_ext/ops/cpu.h"
#include "torch_npu_ext/ops/output_memory.h"

namespace rec_sdk {
namespace {

Weights weights_of(const Checker& check, const SwapAndLookups& all) {
  const Tensor& cache = all.cache;
  check.require(all.dim >= 1 && all.dim <= kMaxDim, "dim must be in [1, ", kMaxDim, "], got ", all.dim);
  const DType dtype = storage_dtype(check, "weight_dtype", all.weight_dtype);
  const int64_t value = dtype_bytes(dtype), bytes = cache.size(1);
  check.require(bytes % value == 0 && bytes >= all.dim * value, "cache must have a multiple of ", value,
                " bytes per row, at least ", all.dim * value, " for dim ", all.dim, ", got ", bytes);
  check.require(reinterpret_cast<uintptr_t>(cache.data_ptr()) % static_cast<uintptr_t>(value) == 0,
                "cache must start at a multiple of ", value, " bytes");
  return {static_cast<const uint8_t*>(cache.data_ptr()), bytes, cache.size(0), all.dim, dtype};
}

SwapRows swap_of(const Checker& check, const SwapAndLookups& all) {
  check.require(all.victim_indices.has_value() == all.victims.has_value(),
                "victim_indices and victims belong together: give both, or neither where no row leaves");
  if (all.victim_indices.has_value()) {
    return swap_arguments(check, all.cache, all.slots, *all.victim_indices, all.rows, *all.victims, nullptr,
                          nullptr);
  }
  const CopyRows a = copy_rows_arguments(all.op, all.cache, all.slots, "rows", all.rows);
  return {a.cache, a.rows, nullptr, a.slots, nullptr, a.bytes, a.cache_slots, a.count, 0};
}

const int32_t* origins_of(const Checker& check, const SwapAndLookups& all) {
  return check.vector<const int32_t>("origins", all.origins, ScalarType::Int, all.lookup_slots.numel());
}

// Checks the origin of each lookup: its slot, or if the swap writes a row to the slot, cache_slots plus the
// index of that row.
void check_origins(const Checker& check, const SwapRows& a, const int32_t* slots, const int32_t* origins,
                   int64_t lookups) {
  check_indices(check, "origins", origins, lookups, a.cache_slots + a.count);
  std::vector<int64_t> of_slot(static_cast<size_t>(a.cache_slots));
  for (int64_t slot = 0; slot < a.cache_slots; ++slot) of_slot[static_cast<size_t>(slot)] = slot;
  for (int64_t i = 0; i < a.count; ++i) of_slot[static_cast<size_t>(a.slots[i])] = a.cache_slots + i;
  for (int64_t j = 0; j < lookups; ++j) {
    const int64_t expected = of_slot[static_cast<size_t>(slots[j])];
    check.require(origins[j] == expected, "origins must be ", expected, " for slot ", slots[j], ", got ",
                  origins[j], " at index ", j);
  }
}

// Checks the contents of all index tensors. It must run before any memory is written.
void check_contents(const Checker& check, const SwapRows& a, const int32_t* slots, const int32_t* origins,
                    int64_t lookups) {
  check_indices(check, "slots", a.slots, a.count, a.cache_slots);
  if (a.victim_indices != nullptr) check_victim_indices(check, a.victim_indices, a.count, a.victim_count);
  check_indices(check, "lookup_slots", slots, lookups, a.cache_slots);
  check_origins(check, a, slots, origins, lookups);
}

void write_staged_rows_on_cpu(const SwapRows& a) {
  if (a.victim_indices != nullptr) {
    swap_on_cpu(a);
  } else {
    scatter_on_cpu({a.cache, const_cast<uint8_t*>(a.rows), a.slots, a.bytes, a.cache_slots, a.count});
  }
}

}  // namespace

Tensor swap_lookup_sequence_output(const SwapAndLookups& all) {
  const Checker check(all.op, all.cache);
  check.tensor("cache", all.cache, ScalarType::Byte, 2);
  check.tensor("lookup_slots", all.lookup_slots, ScalarType::Int, 1);
  weights_of(check, all);  // called for its check of `dim`
  return empty_output(all.cache, all.lookup_slots.size(0), all.dim);
}

SwapLookupSequence swap_lookup_sequence_arguments(const SwapAndLookups& all, const Tensor& out) {
  const Checker check(all.op, all.cache);
  const SwapRows swap = swap_of(check, all);
  const int32_t* slots = check.vector<const int32_t>("lookup_slots", all.lookup_slots, ScalarType::Int);
  return {swap,
          {weights_of(check, all), slots, static_cast<float*>(out.data_ptr()), all.lookup_slots.numel()},
          origins_of(check, all)};
}

SwapLookupPooled swap_lookup_pooled_arguments(const SwapAndLookups& all, const Tensor& offsets,
                                              const OptionalTensor& per_sample_weights, const Tensor& columns,
                                              const Tensor& mean, int64_t first_bag, const Tensor& out) {
  const Checker check(all.op, all.cache);
  const SwapRows swap = swap_of(check, all);
  return {swap,
          pooled_arguments(check, weights_of(check, all), "lookup_slots", all.lookup_slots, offsets,
                           per_sample_weights, columns, mean, first_bag, out),
          origins_of(check, all)};
}

namespace {

Tensor swap_lookup_sequence_cpu(const Tensor& cache, const Tensor& slots,
                                const OptionalTensor& victim_indices, const Tensor& rows,
                                const OptionalTensor& victims, int64_t dim, ScalarType weight_dtype,
                                const Tensor& lookup_slots, const Tensor& origins) {
  const SwapAndLookups all{"swap_lookup_sequence", cache,        slots,  victim_indices, rows, victims, dim,
                           weight_dtype,           lookup_slots, origins};
  const Checker check(all.op, cache);
  Tensor out = swap_lookup_sequence_output(all);
  const SwapLookupSequence a = swap_lookup_sequence_arguments(all, out);
  check_contents(check, a.swap, a.lookup.slots, a.origins, a.lookup.count);
  write_staged_rows_on_cpu(a.swap);
  lookup_sequence_on_cpu(a.lookup);
  return out;
}

void swap_lookup_pooled_cpu(const Tensor& cache, const Tensor& slots, const OptionalTensor& victim_indices,
                            const Tensor& rows, const OptionalTensor& victims, int64_t dim,
                            ScalarType weight_dtype, const Tensor& lookup_slots, const Tensor& origins,
                            const Tensor& offsets, const OptionalTensor& per_sample_weights,
                            const Tensor& columns, const Tensor& mean, int64_t first_bag, const Tensor& out) {
  const SwapAndLookups all{"swap_lookup_pooled", cache,        slots,  victim_indices, rows, victims, dim,
                           weight_dtype,         lookup_slots, origins};
  const Checker check(all.op, cache);
  const SwapLookupPooled a =
      swap_lookup_pooled_arguments(all, offsets, per_sample_weights, columns, mean, first_bag, out);
  check_bags(check, a.lookup.bags, columns.size(0), a.lookup.lookups, dim, out.size(1));
  check_contents(check, a.swap, a.lookup.slots, a.origins, a.lookup.lookups);
  write_staged_rows_on_cpu(a.swap);
  lookup_pooled_on_cpu(a.lookup);
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CPU, m) {
  m.impl("swap_lookup_sequence", TORCH_BOX(&rec_sdk::swap_lookup_sequence_cpu));
  m.impl("swap_lookup_pooled", TORCH_BOX(&rec_sdk::swap_lookup_pooled_cpu));
}
