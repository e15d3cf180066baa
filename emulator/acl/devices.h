// The devices of the emulator, and the current device of each thread.
#pragma once

#include <acl/acl.h>

namespace rec_sdk::emulator {

// Returns the current device of the calling thread; -1 if it has not chosen one yet.
int current_device();
void set_current_device(int device);

// Stores the current device of the calling thread in `device`, for a call that uses it. Fails if there is no
// current device or it is in error.
aclError use_current_device(int* device);

// Returns ACL_SUCCESS if the device exists; otherwise an error that names `call`.
aclError check_device_id(const char* call, int device);

}  // namespace rec_sdk::emulator
