// Queries of CANN's runtime about streams and launches, used by the launch functions on an NPU and emulated.
#pragma once

#include <acl/acl.h>

#include <atomic>
#include <cstdint>
#include <cstdio>

namespace rec_sdk {
namespace ascendc {

// Returns and clears the error of this thread's calls.
inline int32_t take_error() { return aclrtGetLastError(ACL_RT_THREAD_LEVEL); }

// Returns whether there is an error: a launch that reads the results of an earlier one must then not start.
inline bool launch_failed() { return aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL) != ACL_SUCCESS; }

// Returns the number of vector cores that launches on the stream may use: the stream's limit, else the
// device's limit, else all cores. If the runtime reports none, returns 1, which is slow but correct, and
// prints a message once.
inline int64_t vector_cores(void* stream) {
  uint32_t cores = 0;
  const aclError error = aclrtGetStreamResLimit(stream, ACL_RT_DEV_RES_VECTOR_CORE, &cores);
  if (error == ACL_SUCCESS && cores > 0) return cores;
  take_error();  // clears an error that belongs to no launch
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true)) {
    std::fprintf(stderr,
                 "rec_sdk_torch: aclrtGetStreamResLimit gave error %d and %u vector cores; kernels run on "
                 "one core, which "
                 "is slow\n",
                 static_cast<int>(error), cores);
  }
  return 1;
}

}  // namespace ascendc
}  // namespace rec_sdk
