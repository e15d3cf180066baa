// The devices, and the current device of each thread.
#pragma once

#include <acl/acl.h>

namespace rec_sdk::emulator {

// Returns the calling thread's device, or -1 before it has chosen one.
int current_device();
void set_current_device(int device);

// Gets the calling thread's device for a call that works on it; fails if there is none or it is in error.
aclError use_current_device(int* device);

// Returns ACL_SUCCESS if the device exists.
aclError check_device_id(const char* call, int device);

}  // namespace rec_sdk::emulator
