// The operators gather_rows, scatter_rows and swap_rows.
#include <torch/csrc/stable/library.h>

#include "torch_npu_ext/ops/arguments.h"
#include "torch_npu_ext/ops/cpu.h"

namespace rec_sdk {
namespace {

uint8_t* records_of(const Checker& check, const Tensor& cache) {
  check.tensor("cache", cache, ScalarType::Byte, 2);
  check.contiguous("cache", cache);
  return static_cast<uint8_t*>(cache.data_ptr());
}

// Checks the contiguous records in `rows`, and returns the address at which the device accesses them.
uint8_t* packed_rows(const Checker& check, const Tensor& cache, const char* name, const Tensor& rows,
                     int64_t count, void* host_rows) {
  check.type_and_rank(name, rows, ScalarType::Byte, 2);
  check.require(host_rows != nullptr || rows.device() == cache.device(), name,
                " must be on the device of the first argument, or for CUDA in pinned host memory");
  check.contiguous(name, rows);
  check.require(rows.size(0) == count && rows.size(1) == cache.size(1), name, " must be [", count, ", ",
                cache.size(1), "], got [", rows.size(0), ", ", rows.size(1), "]");
  return static_cast<uint8_t*>(host_rows != nullptr ? host_rows : rows.data_ptr());
}

// Returns the number of rows to copy, which is 0 if records have no bytes.
int64_t moved_rows(const Tensor& cache, const Tensor& slots) { return cache.size(1) > 0 ? slots.numel() : 0; }

}  // namespace

Tensor gather_rows_output(const Tensor& cache, const Tensor& slots) {
  const Checker check("gather_rows", cache);
  check.tensor("cache", cache, ScalarType::Byte, 2);
  check.tensor("slots", slots, ScalarType::Int, 1);
  return torch::stable::new_empty(cache, {slots.size(0), cache.size(1)});
}

CopyRows copy_rows_arguments(const char* op, const Tensor& cache, const Tensor& slots, const char* name,
                             const Tensor& rows, void* host_rows) {
  const Checker check(op, cache);
  uint8_t* const records = records_of(check, cache);
  const int32_t* slot = check.vector<const int32_t>("slots", slots, ScalarType::Int);
  uint8_t* const packed = packed_rows(check, cache, name, rows, slots.size(0), host_rows);
  return {records, packed, slot, cache.size(1), cache.size(0), moved_rows(cache, slots)};
}

SwapRows swap_arguments(const Checker& check, const Tensor& cache, const Tensor& slots,
                        const Tensor& victim_indices, const Tensor& rows, const Tensor& victims,
                        void* host_rows, void* host_victims) {
  SwapRows a{};
  a.cache = records_of(check, cache);
  a.bytes = cache.size(1);
  a.cache_slots = cache.size(0);
  a.slots = check.vector<const int32_t>("slots", slots, ScalarType::Int);
  a.victim_indices =
      check.vector<const int32_t>("victim_indices", victim_indices, ScalarType::Int, slots.size(0));
  a.rows = packed_rows(check, cache, "rows", rows, slots.size(0), host_rows);
  a.victims = packed_rows(check, cache, "victims", victims, victims.size(0), host_victims);
  check.require(victims.size(0) <= slots.size(0), "victims must have at most ", slots.size(0), " rows, got ",
                victims.size(0));
  a.count = moved_rows(cache, slots);
  a.victim_count = victims.size(0);
  return a;
}

SwapRows swap_rows_arguments(const Tensor& cache, const Tensor& slots, const Tensor& victim_indices,
                             const Tensor& rows, const Tensor& victims, void* host_rows, void* host_victims) {
  const Checker check("swap_rows", cache);
  return swap_arguments(check, cache, slots, victim_indices, rows, victims, host_rows, host_victims);
}

void scatter_on_cpu(const CopyRows& a) {
  const CpuKernels& kernels = cpu_kernels();
  parallel_pieces(a.count, piece_of(a.bytes),
                  [&](int64_t begin, int64_t end) { kernels.scatter_rows(a, begin, end); });
}

void swap_on_cpu(const SwapRows& a) {
  const CpuKernels& kernels = cpu_kernels();
  parallel_pieces(a.count, piece_of(2 * a.bytes),
                  [&](int64_t begin, int64_t end) { kernels.swap_rows(a, begin, end); });
}

void check_victim_indices(const Checker& check, const int32_t* place, int64_t count, int64_t victims) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    check.require(place[i] == -1 || place[i] == found,
                  "victim_indices must be -1 or the next of 0, 1, ..., here ", found, ", got ", place[i],
                  " at index ", i);
    if (place[i] >= 0) ++found;
  }
  check.require(found == victims, "victims must have one row for each of the ", found,
                " indices that are not -1, got ", victims);
}

namespace {

void gather_rows_out_cpu(const Tensor& cache, const Tensor& slots, const Tensor& out) {
  const Checker check("gather_rows", cache);
  const CopyRows arguments = copy_rows_arguments("gather_rows", cache, slots, "out", out);
  check_indices(check, "slots", arguments.slots, slots.size(0), cache.size(0));
  const CpuKernels& kernels = cpu_kernels();
  parallel_pieces(arguments.count, piece_of(arguments.bytes),
                  [&](int64_t begin, int64_t end) { kernels.gather_rows(arguments, begin, end); });
}

Tensor gather_rows_cpu(const Tensor& cache, const Tensor& slots) {
  Tensor rows = gather_rows_output(cache, slots);
  gather_rows_out_cpu(cache, slots, rows);
  return rows;
}

void scatter_rows_cpu(const Tensor& cache, const Tensor& slots, const Tensor& rows) {
  const Checker check("scatter_rows", cache);
  const CopyRows arguments = copy_rows_arguments("scatter_rows", cache, slots, "rows", rows);
  check_indices(check, "slots", arguments.slots, slots.size(0), cache.size(0));
  scatter_on_cpu(arguments);
}

void swap_rows_cpu(const Tensor& cache, const Tensor& slots, const Tensor& victim_indices, const Tensor& rows,
                   const Tensor& victims) {
  const Checker check("swap_rows", cache);
  const SwapRows arguments = swap_rows_arguments(cache, slots, victim_indices, rows, victims);
  check_indices(check, "slots", arguments.slots, slots.size(0), cache.size(0));
  check_victim_indices(check, arguments.victim_indices, victim_indices.size(0), victims.size(0));
  swap_on_cpu(arguments);
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CPU, m) {
  m.impl("gather_rows", TORCH_BOX(&rec_sdk::gather_rows_cpu));
  m.impl("gather_rows.out", TORCH_BOX(&rec_sdk::gather_rows_out_cpu));
  m.impl("scatter_rows", TORCH_BOX(&rec_sdk::scatter_rows_cpu));
  m.impl("swap_rows", TORCH_BOX(&rec_sdk::swap_rows_cpu));
}
