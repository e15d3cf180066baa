// The CPU kernels, one table of functions per instruction set. Every kernel processes the items [begin, end)
// of its arguments. Ranges may run in any order on any threads; the results are bit-identical.
#pragma once

#include <cstdint>

#include "op_kernels/common/arguments.h"
#include "op_kernels/common/operators.h"

namespace rec_sdk {

struct CpuKernels {
  const char* isa;
#define REC_SDK_POINTER(name, Arguments) void (*name)(const Arguments&, int64_t begin, int64_t end);
  REC_SDK_OPERATORS(REC_SDK_POINTER)
#undef REC_SDK_POINTER
  void (*sum_chunks)(const SumChunks&, int64_t begin, int64_t end);  // items are chunks
  // Items are unique rows; scratch: [dim]. Returns null for an unknown optimizer name.
  void (*(*update_rows)(const char* optimizer))(const UpdateRows&, int64_t begin, int64_t end,
                                                float* scratch);
  void (*accumulate_rows)(const AccumulateRows&, int64_t begin, int64_t end,
                          float* scratch);  // items are unique rows
  // Returns the largest value as an unsigned number, so that negative values exceed all others; 0 for an
  // empty range.
  uint32_t (*largest)(const int32_t* values, int64_t begin, int64_t end);
};

// Returns the best table for this machine, or the one selected with select_cpu_isa.
const CpuKernels& cpu_kernels();

// Selects a table by name ("" = the best); returns false, without effect, if this build or machine lacks it.
// Used by tests.
bool select_cpu_isa(const char* name);

}  // namespace rec_sdk
