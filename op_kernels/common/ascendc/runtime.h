// The answers of CANN's runtime about streams and launches: for the launch functions, on an NPU and emulated.
#pragma once

#include <acl/acl.h>

#include <atomic>
#include <cstdint>
#include <cstdio>

namespace rec_sdk {
namespace ascendc {

// The error of the thread's calls since this was asked last, and forgets it.
inline int32_t take_error() { return aclrtGetLastError(ACL_RT_THREAD_LEVEL); }

// Whether there is one: a launch that reads what an earlier one writes must then not start.
inline bool launch_failed() { return aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL) != ACL_SUCCESS; }

// Vector cores that launches on the stream may use: its limit, else its device's, else all there are. One,
// which is slow but right, where the runtime will not say; that is printed once.
inline int64_t vector_cores(void* stream) {
  uint32_t cores = 0;
  const aclError error = aclrtGetStreamResLimit(stream, ACL_RT_DEV_RES_VECTOR_CORE, &cores);
  if (error == ACL_SUCCESS && cores > 0) return cores;
  take_error();  // no launch's
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
