#include "devices.h"

#include <unistd.h>

#include <atomic>

#include "errors.h"
#include "guard.h"
#include "scheduler.h"
#include "settings.h"

namespace rec_sdk::emulator {
namespace {

thread_local int chosen_device = -1;

struct Context {
  int device;
};

// The contexts of the devices: one per device, for the lifetime of the process.
struct Contexts {
  Context of[kMaxDevices];
  std::atomic<bool> active[kMaxDevices] = {};

  Contexts() {
    for (int i = 0; i < kMaxDevices; ++i) {
      of[i].device = i;
    }
  }
};
Contexts& contexts = *new Contexts;

}  // namespace

int current_device() { return chosen_device; }

void set_current_device(int device) {
  chosen_device = device;
  contexts.active[device] = true;
}

aclError use_current_device(int* device) {
  *device = chosen_device;
  if (chosen_device < 0) {
    return fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has no device; aclrtSetDevice() chooses one");
  }
  return check_device(chosen_device);
}

aclError check_device_id(const char* call, int device) {
  const int devices = settings().devices;
  if (device >= 0 && device < devices) {
    return ACL_SUCCESS;
  }
  return fail(ACL_ERROR_RT_INVALID_DEVICEID,
              text("%s: there is no device %d; the emulator has %d, 0 to %d (REC_SDK_EMULATED_DEVICES)", call,
                   device, devices, devices - 1));
}

}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(settings().devices);
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (const aclError error = check_device_id("aclrtSetDevice", device)) {
    return error;
  }
  set_current_device(device);
  install_guard();
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* device) {
  if (current_device() < 0) {
    return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetDevice: this thread has no device");
  }
  *device = current_device();
  return ACL_SUCCESS;
}

// Waits for all streams and clears the error of the device. Memory stays allocated, because frameworks free
// it after the reset.
aclError aclrtResetDevice(int32_t device) {
  if (const aclError error = check_device_id("aclrtResetDevice", device)) {
    return error;
  }
  wait_for(ends_of_streams(device), kNever);
  clear_device_error(device);
  contexts.active[device] = false;
  return ACL_SUCCESS;
}

aclError aclrtResetDeviceForce(int32_t device) { return aclrtResetDevice(device); }

aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (current_device() < 0) {
    return fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetCurrentContext: this thread has no device");
  }
  *context = &contexts.of[current_device()];
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  for (int i = 0; i < settings().devices; ++i) {
    if (context == &contexts.of[i]) {
      set_current_device(i);
      return ACL_SUCCESS;
    }
  }
  return fail(ACL_ERROR_RT_PARAM_INVALID, text("aclrtSetCurrentContext: %p is no context", context));
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  if (const aclError error = check_device_id("aclrtGetPrimaryCtxState", device)) {
    return error;
  }
  if (flags != nullptr) {
    *flags = 0;
  }
  *active = contexts.active[device] ? 1 : 0;
  return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user_device, int32_t* const device) {
  if (const aclError error = check_device_id("aclrtGetLogicDevIdByUserDevId", user_device)) {
    return error;
  }
  *device = user_device;
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
  int device;
  if (const aclError error = use_current_device(&device)) {
    return error;
  }
  trace("aclrtSynchronizeDevice: device %d", device);
  on_call();
  if (!wait_for(ends_of_streams(device), deadline_in(timeout))) {
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                text("device %d was not done after %d ms", device, timeout));
  }
  return check_device(device);
}

aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(kForever); }

aclError aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t device, int32_t peer) {
  *can_access = 0;
  aclError error = check_device_id("aclrtDeviceCanAccessPeer", device);
  if (error == ACL_SUCCESS) {
    error = check_device_id("aclrtDeviceCanAccessPeer", peer);
  }
  if (error == ACL_SUCCESS) {
    *can_access = device != peer ? 1 : 0;
  }
  return error;
}

aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t) {
  return check_device_id("aclrtDeviceEnablePeerAccess", peer);
}

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return ACL_SUCCESS;
}
