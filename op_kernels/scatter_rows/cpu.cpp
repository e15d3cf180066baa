#include <cstring>

#include "op_kernels/common/arguments.h"
#include "op_kernels/common/prefetch.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

void scatter_rows(const CopyRows& a, int64_t begin, int64_t end) {
  const int64_t ahead = rows_ahead(a.bytes);
  const int64_t fetched = prefetch_bytes(a.cache, a.bytes, a.bytes);
  for (int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) prefetch_row(a.cache + a.slots[i + ahead] * a.bytes, fetched);
    memcpy(a.cache + a.slots[i] * a.bytes, a.rows + i * a.bytes, static_cast<size_t>(a.bytes));
  }
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
