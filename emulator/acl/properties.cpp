// Queries of the runtime's version and of the properties of devices.
#include <acl/acl.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "devices.h"
#include "errors.h"
#include "settings.h"

namespace rec_sdk::emulator {
namespace {

constexpr int64_t kCubeCores = 24, kVectorCores = 48, kL2Bytes = int64_t{192} << 20;

}  // namespace
}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

const char* aclrtGetSocName() { return settings().soc_name.c_str(); }

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo what, int64_t* value) {
  if (const aclError error = check_device_id("aclGetDeviceCapability", static_cast<int>(device))) {
    return error;
  }
  switch (what) {
    case ACL_DEVICE_INFO_AI_CORE_NUM:
      *value = kCubeCores;
      return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
      *value = kVectorCores;
      return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE:
      *value = kL2Bytes;
      return ACL_SUCCESS;
    default:
      return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, text("aclGetDeviceCapability: %d is not emulated", what));
  }
}

aclError aclsysGetVersionStr(char* package, char* version) {
  trace("aclsysGetVersionStr: %s", package);
  std::strcpy(version, "8.5.0");  // torch_npu enables features according to this version
  return ACL_SUCCESS;
}

void aclAppLog(aclLogLevel, const char* function, const char*, uint32_t, const char* format, ...) {
  if (!settings().trace) {
    return;
  }
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  trace("%s: %s", function != nullptr ? function : "torch_npu", line);
}

// These settings of the hardware have no effect in the emulator.
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }

aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* on) {
  *on = 0;
  return ACL_SUCCESS;
}
