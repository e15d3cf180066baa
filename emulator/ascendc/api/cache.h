// The data cache through which the scalar unit accesses global memory.
#pragma once

#include "emulator/ascendc/api/tensors.h"

namespace AscendC {

enum class CacheLine : uint64_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

template <typename T, CacheLine entireType, DcciDst dcciDst>
void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst) {
  static_assert(dcciDst == DcciDst::CACHELINE_OUT || dcciDst == DcciDst::CACHELINE_ALL,
                "DataCacheCleanAndInvalid: for global memory, CACHELINE_OUT or CACHELINE_ALL");
  if constexpr (entireType == CacheLine::ENTIRE_DATA_CACHE) {
    rec_sdk::emulator::clean_cache();
  } else {
    rec_sdk::emulator::clean_cache_line(dst.memory());
  }
}

}  // namespace AscendC
