#include "errors.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>

#include "devices.h"
#include "settings.h"

namespace rec_sdk::emulator {
namespace {

std::string formatted(const char* format, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  std::string result(static_cast<size_t>(std::vsnprintf(nullptr, 0, format, again)), '\0');
  va_end(again);
  std::vsnprintf(result.data(), result.size() + 1, format, arguments);
  return result;
}

struct DeviceError {
  std::atomic<bool> failed{false};
  aclError code = ACL_SUCCESS;  // `code` and `message` are written before `failed` is set
  std::string message;
};

// This object is never destroyed, because streams still run while the process ends.
std::mutex& error_mutex = *new std::mutex;
DeviceError* const device_errors = new DeviceError[kMaxDevices];

struct ThreadError {
  aclError last = ACL_SUCCESS;
  std::string message;
  std::string handed_out;  // the string that aclGetRecentErrMsg() returned, valid until the next call
};
thread_local ThreadError thread_error;

}  // namespace

std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string result = formatted(format, arguments);
  va_end(arguments);
  return result;
}

void trace(const char* format, ...) {
  if (!settings().trace) {
    return;
  }
  va_list arguments;
  va_start(arguments, format);
  const std::string line = formatted(format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "NPU emulator: %s\n", line.c_str());
}

aclError fail(aclError code, std::string message) {
  trace("error %d: %s", code, message.c_str());
  thread_error.last = code;
  thread_error.message = std::move(message);
  return code;
}

void fail_device(int device, aclError code, const std::string& message) {
  const std::lock_guard<std::mutex> lock(error_mutex);
  DeviceError& error = device_errors[device];
  if (error.failed) {
    return;
  }
  error.code = code;
  error.message = text("device %d, %s", device, message.c_str());
  error.failed = true;
  std::fprintf(stderr, "NPU emulator: %s\n", error.message.c_str());
}

bool is_failed(int device) { return device_errors[device].failed; }

void clear_device_error(int device) {
  const std::lock_guard<std::mutex> lock(error_mutex);
  device_errors[device].failed = false;
}

aclError check_device(int device) {
  const DeviceError& error = device_errors[device];
  if (!error.failed) {
    return ACL_SUCCESS;
  }
  const std::lock_guard<std::mutex> lock(error_mutex);
  return fail(error.code, "the device is in error: " + error.message);
}

}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

const char* aclGetRecentErrMsg() {
  ThreadError& error = thread_error;
  error.handed_out.swap(error.message);
  error.message.clear();
  if (error.handed_out.empty() && current_device() >= 0 && check_device(current_device()) != ACL_SUCCESS) {
    error.handed_out.swap(error.message);
  }
  return error.handed_out.c_str();
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return thread_error.last; }

aclError aclrtGetLastError(aclrtLastErrLevel) {
  const aclError last = thread_error.last;
  thread_error.last = ACL_SUCCESS;
  return last;
}
