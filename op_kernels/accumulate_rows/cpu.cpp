#include "op_kernels/accumulate_rows/two_sum.h"
#include "op_kernels/common/aggregate.h"
#include "op_kernels/common/arguments.h"
#include "op_kernels/common/convert.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

void accumulate_rows(const AccumulateRows& a, int64_t begin, int64_t end, float* scratch) {
  with_dim(a.segments.dim, [&](auto fixed) {
    constexpr int64_t kDim = decltype(fixed)::value;
    const int64_t dim = kDim > 0 ? kDim : a.segments.dim;
    uint8_t* base = reinterpret_cast<uint8_t*>(a.pending);
    for_each_row<kDim>(a.segments, base, dim * 8, begin, end, scratch,
                       [&](int64_t, uint8_t* row, const float* g) {
                         float* sums = reinterpret_cast<float*>(row);
                         float* compensations = sums + dim;
#pragma GCC ivdep
                         for (int64_t k = 0; k < dim; ++k) two_sum(sums[k], compensations[k], g[k]);
                       });
  });
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
