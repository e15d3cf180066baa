// The devices, and which of them a thread uses.
#pragma once

#include <acl/acl.h>

namespace rec_sdk::emulator {

// The calling thread's device, or -1 before it has chosen one.
int current_device();
void set_current_device(int device);

// The calling thread's device, for a call that works on it: there is one, and it is not in error.
aclError use_current_device(int* device);

// ACL_SUCCESS if there is such a device.
aclError check_device_id(const char* call, int device);

}  // namespace rec_sdk::emulator
