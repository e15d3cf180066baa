// Errors of single calls, per thread, and errors of devices, which last until the device is reset.
#pragma once

#include <acl/acl.h>

#include <string>

namespace rec_sdk::emulator {

__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...);

// Prints one line to stderr if tracing is enabled.
__attribute__((format(printf, 1, 2))) void trace(const char* format, ...);

// Stores the message for this thread's next aclGetRecentErrMsg(), and returns `code`.
aclError fail(aclError code, std::string message);

// Puts the device into error, with a line on stderr. The first error is kept.
void fail_device(int device, aclError code, const std::string& message);
bool is_failed(int device);
void clear_device_error(int device);

// Returns ACL_SUCCESS, or the device's error, which then also becomes this thread's error.
aclError check_device(int device);

}  // namespace rec_sdk::emulator
