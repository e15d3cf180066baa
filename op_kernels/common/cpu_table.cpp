// The table of the kernels compiled for this instruction set.
#include "op_kernels/common/cpu_kernels.h"
#include "op_kernels/common/isa.h"

#define REC_SDK_STRING_OF(name) #name
#define REC_SDK_STRING(name) REC_SDK_STRING_OF(name)

namespace rec_sdk {
namespace REC_SDK_ISA {

using UpdateKernel = void (*)(const UpdateRows&, int64_t, int64_t, float*);

#define REC_SDK_DECLARE(name, Arguments) void name(const Arguments&, int64_t, int64_t);
REC_SDK_OPERATORS(REC_SDK_DECLARE)
void sum_chunks(const SumChunks&, int64_t, int64_t);
UpdateKernel update_rows(const char* optimizer);
void accumulate_rows(const AccumulateRows&, int64_t, int64_t, float*);
uint32_t largest(const int32_t*, int64_t, int64_t);

extern const CpuKernels kKernels;
const CpuKernels kKernels = {
    REC_SDK_STRING(REC_SDK_ISA),
#define REC_SDK_ENTRY(name, Arguments) name,
    REC_SDK_OPERATORS(REC_SDK_ENTRY)  //
    sum_chunks,
    update_rows,
    accumulate_rows,
    largest,
};

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
