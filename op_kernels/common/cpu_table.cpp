// The kernels compiled for this instruction set, gathered into its table.
#include "op_kernels/common/cpu_kernels.h"
#include "op_kernels/common/isa.h"

#define REC_SDK_STRING_OF(name) #name
#define REC_SDK_STRING(name) REC_SDK_STRING_OF(name)

namespace rec_sdk {
namespace REC_SDK_ISA {

using UpdateKernel = void (*)(const UpdateRows&, int64_t, int64_t, float*);

void lookup_sequence(const LookupSequence&, int64_t, int64_t);
void lookup_pooled(const LookupPooled&, int64_t, int64_t);
void pooled_weights_grad(const PooledWeightsGrad&, int64_t, int64_t);
void sum_chunks(const SumChunks&, int64_t, int64_t);
UpdateKernel update_rows(const char* optimizer);
void accumulate_rows(const AccumulateRows&, int64_t, int64_t, float*);
void gather_rows(const CopyRows&, int64_t, int64_t);
void scatter_rows(const CopyRows&, int64_t, int64_t);
void swap_rows(const SwapRows&, int64_t, int64_t);
uint32_t largest(const int32_t*, int64_t, int64_t);

extern const CpuKernels kKernels;
const CpuKernels kKernels = {
    REC_SDK_STRING(REC_SDK_ISA),
    lookup_sequence,
    lookup_pooled,
    pooled_weights_grad,
    sum_chunks,
    update_rows,
    accumulate_rows,
    gather_rows,
    scatter_rows,
    swap_rows,
    largest,
};

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
