// The hot segments of a batch: segments of more than kHotLookups lookups of one row, which devices sum in
// chunks. Several threads record hot segments in parallel. Each one contains a multiple of kHotLookups, and
// is stored at the index of its first such multiple until all are recorded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "op_kernels/common/arguments.h"

namespace rec_sdk {

inline int64_t hot_segment_places(int64_t lookups) {
  return lookups > kHotLookups ? (lookups + kHotLookups - 1) / kHotLookups : 0;
}

inline void clear_hot_segments(HotSegment* places, int64_t lookups) noexcept {
  std::fill_n(places, hot_segment_places(lookups), HotSegment{});
}

inline void record_hot_segment(HotSegment* places, int64_t row, uint32_t first, uint32_t lookups) noexcept {
  constexpr uint32_t kHot = kHotLookups;
  if (lookups <= kHot) return;
  places[(first + kHot - 1) / kHot] = {static_cast<int32_t>(row), static_cast<int32_t>(first),
                                       static_cast<int32_t>(lookups / kHot), 0};
}

// Moves the recorded hot segments to the front, in ascending order of rows, and returns their number.
inline int64_t collect_hot_segments(HotSegment* places, int64_t lookups) noexcept {
  HotSegment* const end = std::remove_if(places, places + hot_segment_places(lookups),
                                         [](const HotSegment& place) { return place.chunks == 0; });
  int32_t chunks = 0;
  for (HotSegment* hot = places; hot != end; ++hot) {
    hot->chunks_before = chunks;
    chunks += hot->chunks;
  }
  return end - places;
}

// Returns the hot segments among the segments with these offsets.
inline std::vector<HotSegment> hot_segments_of(const std::vector<int32_t>& offsets) {
  std::vector<HotSegment> places(static_cast<size_t>(hot_segment_places(offsets.back())));
  for (size_t u = 0; u + 1 < offsets.size(); ++u) {
    const uint32_t first = static_cast<uint32_t>(offsets[u]);
    record_hot_segment(places.data(), static_cast<int64_t>(u), first,
                       static_cast<uint32_t>(offsets[u + 1]) - first);
  }
  places.resize(static_cast<size_t>(collect_hot_segments(places.data(), offsets.back())));
  return places;
}

}  // namespace rec_sdk
