#include <torch/csrc/stable/library.h>

#include "torch_npu_ext/ops/arguments.h"
#include "torch_npu_ext/ops/cpu.h"

namespace rec_sdk {

Tensor gather_rows_output(const Tensor& cache, const Tensor& slots) {
  const Checker check("gather_rows", cache);
  check.tensor("cache", cache, ScalarType::Byte, 2);
  check.tensor("slots", slots, ScalarType::Int, 1);
  return torch::stable::new_empty(cache, {slots.size(0), cache.size(1)});
}

CopyRows copy_rows_arguments(const char* op, const Tensor& cache, const Tensor& slots, const char* name,
                             const Tensor& rows, void* host_rows) {
  const Checker check(op, cache);
  check.tensor("cache", cache, ScalarType::Byte, 2);
  check.contiguous("cache", cache);
  const int32_t* slot = check.vector<const int32_t>("slots", slots, ScalarType::Int);
  check.type_and_rank(name, rows, ScalarType::Byte, 2);
  check.require(host_rows != nullptr || rows.device() == cache.device(), name,
                " must be on the device of the first argument, or for CUDA in pinned host memory");
  check.contiguous(name, rows);
  check.require(rows.size(0) == slots.size(0) && rows.size(1) == cache.size(1), name, " must be [",
                slots.size(0), ", ", cache.size(1), "], got [", rows.size(0), ", ", rows.size(1), "]");
  return {static_cast<uint8_t*>(cache.data_ptr()),
          static_cast<uint8_t*>(host_rows != nullptr ? host_rows : rows.data_ptr()),
          slot,
          cache.size(1),
          cache.size(0),
          cache.size(1) > 0 ? slots.numel() : 0};  // of records without bytes there is nothing to copy
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
  const CpuKernels& kernels = cpu_kernels();
  parallel_pieces(arguments.count, piece_of(arguments.bytes),
                  [&](int64_t begin, int64_t end) { kernels.scatter_rows(arguments, begin, end); });
}

}  // namespace
}  // namespace rec_sdk

STABLE_TORCH_LIBRARY_IMPL(rec_sdk, CPU, m) {
  m.impl("gather_rows", TORCH_BOX(&rec_sdk::gather_rows_cpu));
  m.impl("gather_rows.out", TORCH_BOX(&rec_sdk::gather_rows_out_cpu));
  m.impl("scatter_rows", TORCH_BOX(&rec_sdk::scatter_rows_cpu));
}
