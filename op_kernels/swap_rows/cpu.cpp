#include <cstring>

#include "op_kernels/common/arguments.h"
#include "op_kernels/common/prefetch.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

void swap_rows(const SwapRows& a, int64_t begin, int64_t end) {
  const int64_t ahead = rows_ahead(a.bytes);
  const int64_t fetched = prefetch_bytes(a.cache, a.bytes, a.bytes);
  const size_t size = static_cast<size_t>(a.bytes);
  for (int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) prefetch_row(a.cache + a.slots[i + ahead] * a.bytes, fetched);
    uint8_t* const cached = a.cache + a.slots[i] * a.bytes;
    if (a.victim_indices[i] >= 0) memcpy(a.victims + a.victim_indices[i] * a.bytes, cached, size);
    memcpy(cached, a.rows + i * a.bytes, size);
  }
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
