// Host side: the number of cores of a launch.
#pragma once

#include <cstdint>

#include "op_kernels/common/arguments.h"

namespace rec_sdk {
namespace ascendc {

// Minimum number of bytes per core of a launch. One core copies them in half a microsecond; a launch on more
// cores takes longer to start.
constexpr int64_t kBytesWorthACore = 16384;

inline int64_t blocks_for(int64_t bytes, int64_t cores) {
  const int64_t useful = (bytes + kBytesWorthACore - 1) / kBytesWorthACore;
  return useful < cores ? useful : cores;
}

inline int64_t row_bytes(const Weights& weights) { return weights.dim * dtype_bytes(weights.dtype); }

// Returns the approximate number of bytes that the operator moves.
inline int64_t work_of(const LookupSequence& a) {
  return a.count * (row_bytes(a.weights) + a.weights.dim * 4);
}
inline int64_t work_of(const LookupPooled& a) {
  return a.lookups * row_bytes(a.weights) + a.bags.count * a.weights.dim * 4;
}
inline int64_t work_of(const SwapRows& a) { return 2 * (a.count + a.victim_count) * a.bytes; }

inline int64_t blocks_of(const LookupSequence& a, int64_t cores) { return blocks_for(work_of(a), cores); }

inline int64_t blocks_of(const LookupPooled& a, int64_t cores) { return blocks_for(work_of(a), cores); }

inline int64_t blocks_of(const PooledWeightsGrad& a, int64_t cores) {
  return blocks_for(a.lookups * row_bytes(a.weights), cores);
}

inline int64_t blocks_of(const CopyRows& a, int64_t cores) {
  return blocks_for(2 * a.count * a.bytes, cores);
}

inline int64_t blocks_of(const SwapRows& a, int64_t cores) { return blocks_for(work_of(a), cores); }

inline int64_t blocks_of(const SwapLookupSequence& a, int64_t cores) {
  return blocks_for(work_of(a.swap) + work_of(a.lookup), cores);
}

inline int64_t blocks_of(const SwapLookupPooled& a, int64_t cores) {
  return blocks_for(work_of(a.swap) + work_of(a.lookup), cores);
}

}  // namespace ascendc
}  // namespace rec_sdk
