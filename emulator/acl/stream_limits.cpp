// Limits on the number of cores that the kernels of a stream may use; only kernel launches read them.
#include <acl/acl.h>

#include "errors.h"
#include "settings.h"
#include "stream.h"

namespace rec_sdk::emulator {
namespace {

// Returns the number of cores of a type; 0 for an unknown type.
uint32_t cores_of(aclrtDevResLimitType type) {
  const auto vector_cores = static_cast<uint32_t>(settings().soc->vector_cores);
  return type == ACL_RT_DEV_RES_VECTOR_CORE ? vector_cores
         : type == ACL_RT_DEV_RES_CUBE_CORE ? vector_cores / 2
                                            : 0;
}

}  // namespace
}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

aclError aclrtSetStreamResLimit(aclrtStream handle, aclrtDevResLimitType type, uint32_t value) {
  std::shared_ptr<Stream> stream;
  if (const aclError error = find_stream("aclrtSetStreamResLimit", handle, &stream)) {
    return error;
  }
  if (value == 0 || value > cores_of(type)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, text("aclrtSetStreamResLimit: %u cores of type %d; there are %u",
                                                 value, static_cast<int>(type), cores_of(type)));
  }
  stream->core_limits[type] = value;
  return ACL_SUCCESS;
}

aclError aclrtGetStreamResLimit(aclrtStream handle, aclrtDevResLimitType type, uint32_t* value) {
  std::shared_ptr<Stream> stream;
  if (const aclError error = find_stream("aclrtGetStreamResLimit", handle, &stream)) {
    return error;
  }
  if (cores_of(type) == 0) {
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                text("aclrtGetStreamResLimit: there are no cores of type %d", static_cast<int>(type)));
  }
  const uint32_t limit = stream->core_limits[type];
  *value = limit > 0 ? limit : cores_of(type);
  return ACL_SUCCESS;
}

aclError aclrtResetStreamResLimit(aclrtStream handle) {
  std::shared_ptr<Stream> stream;
  if (const aclError error = find_stream("aclrtResetStreamResLimit", handle, &stream)) {
    return error;
  }
  for (auto& limit : stream->core_limits) {
    limit = 0;
  }
  return ACL_SUCCESS;
}

// Does nothing: the limits would apply to aclnn operators, and emulated operators run on the host.
aclError aclrtUseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
