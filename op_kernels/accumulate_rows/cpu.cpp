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
                         for (int64_t k = 0; k < dim; ++k) {
                           // Knuth's two-sum gives the rounding error of the addition exactly; the last two
                           // lines renormalise, so that the sum alone is the best float for the total.
                           const float sum = sums[k], total = sum + g[k], virtual_g = total - sum;
                           const float error = (sum - (total - virtual_g)) + (g[k] - virtual_g);
                           const float compensation = compensations[k] + error;
                           const float best = total + compensation;
                           sums[k] = best;
                           compensations[k] = compensation - (best - total);
                         }
                       });
  });
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
