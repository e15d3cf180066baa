// Errors of calls, which are stored per thread, and errors of devices, which last until the device is reset.
#pragma once

#include <acl/acl.h>

#include <string>

namespace rec_sdk::emulator {

__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...);

// Prints a line to stderr if REC_SDK_EMULATED_TRACE is 1.
__attribute__((format(printf, 1, 2))) void trace(const char* format, ...);

// Stores the message that the next call of aclGetRecentErrMsg() on this thread returns, and returns `code`.
aclError fail(aclError code, std::string message);

// Puts the device into error and prints the message to stderr. Only the first error of a device is kept.
void fail_device(int device, aclError code, const std::string& message);
bool is_failed(int device);
void clear_device_error(int device);

// Returns ACL_SUCCESS, or the error of the device, whose message then also becomes the error message of this
// thread.
aclError check_device(int device);

}  // namespace rec_sdk::emulator
