// Which ids a hash table takes in. A lookup of an id that it does not take reads the table's default row.
#pragma once

#include <cstdint>

namespace rec_sdk {

class AdmissionFilter {
 public:
  virtual ~AdmissionFilter() = default;

  // Asked for every lookup of a training batch whose id the table does not know, in the order of the lookups,
  // and by one thread at a time. What it counts stays counted when the batch fails or is cancelled.
  virtual bool admit(int64_t id) noexcept = 0;
};

}  // namespace rec_sdk
