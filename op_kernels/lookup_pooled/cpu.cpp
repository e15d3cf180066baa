#include "op_kernels/common/aggregate.h"
#include "op_kernels/common/arguments.h"
#include "op_kernels/common/bags.h"
#include "op_kernels/common/convert.h"

namespace rec_sdk {
namespace REC_SDK_ISA {
namespace {

// The rows of lookups as terms of a sum.
template <class Format, bool kWeighted>
struct RowTerms {
  using Stored = typename Format::Storage;
  const LookupPooled& a;
  int64_t fetched, ahead, last;

  struct Row {
    const Stored* __restrict data;
    float weight;
    REC_SDK_INLINE float operator[](int64_t k) const {
      return kWeighted ? weight * Format::load(data[k]) : Format::load(data[k]);
    }
  };

  REC_SDK_INLINE RowTerms(const LookupPooled& arguments, int64_t lookups)
      : a(arguments),
        fetched(prefetch_bytes(a.weights.data, a.weights.stride_bytes, row_bytes(a.weights))),
        ahead(rows_ahead(row_bytes(a.weights))),
        last(lookups) {}

  static REC_SDK_INLINE int64_t row_bytes(const Weights& weights) {
    return weights.dim * static_cast<int64_t>(sizeof(Stored));
  }

  REC_SDK_INLINE const uint8_t* address(int64_t j) const {
    return a.weights.data + a.slots[j] * a.weights.stride_bytes;
  }
  REC_SDK_INLINE Row row(int64_t j, int64_t column) const {
    return {reinterpret_cast<const Stored*>(address(j)) + column, kWeighted ? a.per_sample_weights[j] : 1.0f};
  }
  REC_SDK_INLINE void prefetch(int64_t j) const {
    if (j + ahead < last) prefetch_row(address(j + ahead), fetched);
  }
};

template <class Terms, int64_t kDim>
void pool_bags(const LookupPooled& a, int64_t begin, int64_t end) {
  const int64_t dim = kDim > 0 ? kDim : a.weights.dim;
  const int64_t* offsets = a.bags.offsets;
  const Terms terms(a, offsets[end]);
  BagCursor bag(a.bags, begin);
  for (int64_t k = begin; k < end; ++k, bag.next()) {
    float* __restrict out = a.out + bag.sample * a.out_stride + bag.column();
    const int64_t first = offsets[k], last = offsets[k + 1];
    if (first == last) {
      for (int64_t i = 0; i < dim; ++i) out[i] = 0;
      continue;
    }
    pairwise_sum<kDim>(terms, first, last, dim, out);
    if (bag.mean()) {
      const float length = static_cast<float>(last - first);
      for (int64_t i = 0; i < dim; ++i) out[i] /= length;
    }
  }
}

}  // namespace

void lookup_pooled(const LookupPooled& a, int64_t begin, int64_t end) {
  if (begin == end) return;
  with_format(a.weights.dtype, [&](auto format) {
    with_dim(a.weights.dim, [&](auto dim) {
      using Format = decltype(format);
      if (a.per_sample_weights != nullptr) {
        pool_bags<RowTerms<Format, true>, decltype(dim)::value>(a, begin, end);
      } else {
        pool_bags<RowTerms<Format, false>, decltype(dim)::value>(a, begin, end);
      }
    });
  });
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
