// Iteration over the bags of a pooled lookup, feature by feature.
#pragma once

#include <cstdint>

#include "op_kernels/common/arguments.h"
#include "op_kernels/common/isa.h"

namespace rec_sdk {
namespace REC_SDK_ISA {

// The position of bag k in the output, and its pooling.
struct BagCursor {
  const Bags& bags;
  int64_t feature, sample;

  REC_SDK_HD BagCursor(const Bags& all, int64_t k)
      : bags(all),
        feature((all.first_bag + k) / all.batch_size),
        sample((all.first_bag + k) % all.batch_size) {}

  REC_SDK_HD void next() {
    if (++sample == bags.batch_size) {
      sample = 0;
      ++feature;
    }
  }
  REC_SDK_HD int64_t column() const { return bags.columns[feature]; }
  REC_SDK_HD bool mean() const { return bags.mean[feature]; }
};

// Returns the bag that contains a lookup: the last one that starts at or before it. It must not be before bag
// `low`.
REC_SDK_HD int64_t bag_of(const Bags& bags, int64_t lookup, int64_t low = 0) {
  int64_t high = bags.count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (bags.offsets[middle] <= lookup) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace REC_SDK_ISA
}  // namespace rec_sdk
