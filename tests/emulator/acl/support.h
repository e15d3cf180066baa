// Shared by the tests of the emulated runtime.
#pragma once

#include <acl/acl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "emulator.h"

constexpr uint64_t kMemory = 64 << 20;  // of each device

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // takes the faults of a process, and has memory of its own
#else
constexpr bool kSanitized = false;
#endif

// Starts the runtime with two devices, the first being the thread's.
inline void start() {
  setenv("REC_SDK_EMULATED_MEMORY", "64M", 1);
  setenv("REC_SDK_EMULATED_DEVICES", "2", 1);
  CHECK(aclInit(nullptr) == ACL_SUCCESS);
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
}

template <class T = char>
T* device_memory(size_t count) {
  void* address = nullptr;
  CHECK(aclrtMalloc(&address, count * sizeof(T), ACL_MEM_MALLOC_HUGE_FIRST) == ACL_SUCCESS);
  return static_cast<T*>(address);
}

template <class T = char>
T* pinned_memory(size_t count) {
  void* address = nullptr;
  CHECK(aclrtMallocHost(&address, count * sizeof(T)) == ACL_SUCCESS);
  return static_cast<T*>(address);
}

template <class T>
std::vector<T> to_host(const T* device, size_t count) {
  std::vector<T> host(count);
  CHECK(aclrtMemcpy(host.data(), count * sizeof(T), device, count * sizeof(T), ACL_MEMCPY_DEVICE_TO_HOST) ==
        ACL_SUCCESS);
  return host;
}

template <class T>
T* to_device(const std::vector<T>& host) {
  T* device = device_memory<T>(host.size());
  const size_t bytes = host.size() * sizeof(T);
  CHECK(aclrtMemcpy(device, bytes, host.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE) == ACL_SUCCESS);
  return device;
}

inline aclrtStream new_stream() {
  aclrtStream stream = nullptr;
  CHECK(aclrtCreateStream(&stream) == ACL_SUCCESS);
  return stream;
}

inline aclrtEvent new_event() {
  aclrtEvent event = nullptr;
  CHECK(aclrtCreateEventExWithFlag(&event, ACL_EVENT_TIME_LINE) == ACL_SUCCESS);
  return event;
}

inline bool contains(const std::string& text, const char* part) {
  if (text.find(part) != std::string::npos) {
    return true;
  }
  std::fprintf(stderr, "expected \"%s\" in: %s\n", part, text.c_str());
  return false;
}

// Checks that the message of the call that just failed contains `words`.
inline bool message_has(const char* part) { return contains(aclGetRecentErrMsg(), part); }

struct Ending {
  int status;  // as waitpid() gives it
  std::string output;
};

// Runs `work` in a child process; what it wrote to stderr, and how it ended.
inline Ending in_child(const std::function<void()>& work) {
  int ends[2];
  if (pipe(ends) != 0) {
    std::abort();
  }
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    work();
    _exit(0);
  }
  close(ends[1]);
  Ending ending{};
  char part[1024];
  for (ssize_t got; (got = read(ends[0], part, sizeof part)) > 0;) {
    ending.output.append(part, static_cast<size_t>(got));
  }
  close(ends[0]);
  waitpid(child, &ending.status, 0);
  return ending;
}
