#include "op_kernels/common/arguments.h"
#include "op_kernels/common/convert.h"
#include "op_kernels/common/prefetch.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

void lookup_sequence(const LookupSequence& a, int64_t begin, int64_t end) {
  with_format(a.weights.dtype, [&](auto format) {
    with_dim(a.weights.dim, [&](auto fixed) {
      using Format = decltype(format);
      using Stored = typename Format::Storage;
      const int64_t dim = decltype(fixed)::value > 0 ? decltype(fixed)::value : a.weights.dim;
      const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(Stored));
      const int64_t ahead = rows_ahead(row_bytes);
      const int64_t fetched = prefetch_bytes(a.weights.data, a.weights.stride_bytes, row_bytes);
      const auto row = [&](int64_t i) { return a.weights.data + a.slots[i] * a.weights.stride_bytes; };
      for (int64_t i = begin; i < end; ++i) {
        if (i + ahead < end) prefetch_row(row(i + ahead), fetched);
        const Stored* __restrict from = reinterpret_cast<const Stored*>(row(i));
        float* __restrict to = a.out + i * dim;
        for (int64_t k = 0; k < dim; ++k) to[k] = Format::load(from[k]);
      }
    });
  });
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
