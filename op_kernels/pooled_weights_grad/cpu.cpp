#include "op_kernels/common/aggregate.h"
#include "op_kernels/common/arguments.h"
#include "op_kernels/common/bags.h"
#include "op_kernels/common/convert.h"
#include "op_kernels/common/prefetch.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

void pooled_weights_grad(const PooledWeightsGrad& a, int64_t begin, int64_t end) {
  if (begin == end) return;
  with_format(a.weights.dtype, [&](auto format) {
    using Format = decltype(format);
    using Stored = typename Format::Storage;
    const int64_t dim = a.weights.dim;
    const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(Stored));
    const int64_t ahead = rows_ahead(row_bytes);
    const int64_t fetched = prefetch_bytes(a.weights.data, a.weights.stride_bytes, row_bytes);
    const auto row = [&](int64_t j) { return a.weights.data + a.slots[j] * a.weights.stride_bytes; };
    int64_t k = bag_of(a.bags, begin);
    BagCursor bag(a.bags, k);
    for (int64_t j = begin; j < end; ++j) {
      for (; j >= a.bags.offsets[k + 1]; ++k) bag.next();
      if (j + ahead < end) prefetch_row(row(j + ahead), fetched);
      const Stored* weight = reinterpret_cast<const Stored*>(row(j));
      const float* grad = a.grad + bag.sample * a.grad_stride + bag.column();
      const float dot = lane_sum(dim, [&](int64_t i) { return grad[i] * Format::load(weight[i]); });
      a.out[j] = bag.mean() ? dot / static_cast<float>(a.bags.offsets[k + 1] - a.bags.offsets[k]) : dot;
    }
  });
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
