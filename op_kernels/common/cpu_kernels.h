// The CPU kernels, one table for each instruction set they were compiled for. Every kernel does the items
// [begin, end) of its arguments; ranges may run in any order on any threads, and the bits stay the same.
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
  void (*sum_chunks)(const SumChunks&, int64_t begin, int64_t end);  // chunks
  // Unique rows; scratch: [dim]. Null for a name that is no optimizer.
  void (*(*update_rows)(const char* optimizer))(const UpdateRows&, int64_t begin, int64_t end,
                                                float* scratch);
  void (*accumulate_rows)(const AccumulateRows&, int64_t begin, int64_t end, float* scratch);  // unique rows
  // The largest of the values as unsigned numbers, among which negative ones are above all others; 0 for
  // none.
  uint32_t (*largest)(const int32_t* values, int64_t begin, int64_t end);
};

// The best table for this machine, or the one select_cpu_isa chose.
const CpuKernels& cpu_kernels();

// The table of that name ("" = the best); false, and no change, when this build or machine lacks it. For
// tests.
bool select_cpu_isa(const char* name);

}  // namespace rec_sdk
