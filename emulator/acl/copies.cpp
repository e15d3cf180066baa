// Copies and fills of host and device memory, either synchronous or on a stream.
#include <acl/acl.h>

#include <cstring>
#include <stdexcept>

#include "addresses.h"
#include "devices.h"
#include "errors.h"
#include "host_memory.h"
#include "live_memory.h"
#include "scheduler.h"
#include "stream.h"

namespace rec_sdk::emulator {
namespace {

enum class Place { kHost, kDevice, kAny };

struct Kind {
  const char* name;
  Place source, destination;
};

// The kinds of copies, indexed by aclrtMemcpyKind.
constexpr Kind kKinds[] = {
    {"ACL_MEMCPY_HOST_TO_HOST", Place::kHost, Place::kHost},
    {"ACL_MEMCPY_HOST_TO_DEVICE", Place::kHost, Place::kDevice},
    {"ACL_MEMCPY_DEVICE_TO_HOST", Place::kDevice, Place::kHost},
    {"ACL_MEMCPY_DEVICE_TO_DEVICE", Place::kDevice, Place::kDevice},
    {"ACL_MEMCPY_DEFAULT", Place::kAny, Place::kAny},
    {"ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE", Place::kHost, Place::kDevice},
    {"ACL_MEMCPY_INNER_DEVICE_TO_DEVICE", Place::kDevice, Place::kDevice},
    {"ACL_MEMCPY_INTER_DEVICE_TO_DEVICE", Place::kDevice, Place::kDevice},
};

// The source or the destination of a copy: the address that the caller passed, and the host address of its
// contents.
struct End {
  const char* role;
  void* address;
  uint64_t bytes;
  char* usable = nullptr;
  int device = -1;  // -1 for host memory
  bool pinned = false;

  std::string describe() const {
    return text("the %s, %llu bytes at %p", role, static_cast<unsigned long long>(bytes), address);
  }
};

// Determines the memory to which the address of `end` belongs. Returns an error message, or an empty string
// if there is no error.
std::string resolve(End* end, Place place, const char* kind) {
  if (is_device_address(end->address)) {
    if (place == Place::kHost) {
      return text("%s, is device memory, but the kind is %s", end->describe().c_str(), kind);
    }
    end->usable = accessible(end->address, end->bytes, &end->device);
    if (end->usable == nullptr) {
      return text("%s, is not inside one live allocation; there is %s", end->describe().c_str(),
                  describe(end->address).c_str());
    }
    return "";
  }
  if (place == Place::kDevice) {
    return text("%s, is not device memory, but the kind is %s", end->describe().c_str(), kind);
  }
  const HostMemory memory = host_memory_at(end->address, end->bytes);
  if (end->address == nullptr || memory == HostMemory::kPartlyPinned) {
    return text("%s, is not inside one allocation of host memory", end->describe().c_str());
  }
  end->usable = static_cast<char*>(end->address);
  end->pinned = memory == HostMemory::kPinned;
  return "";
}

struct Copy {
  End destination, source;
  const Kind* kind;

  std::string resolve_both() {
    std::string problem = resolve(&destination, kind->destination, kind->name);
    if (problem.empty()) {
      problem = resolve(&source, kind->source, kind->name);
    }
    const bool inner = kind == &kKinds[ACL_MEMCPY_INNER_DEVICE_TO_DEVICE];
    if (problem.empty() && inner && source.device != destination.device) {
      return text("the kind is %s, but the source is on device %d and the destination on device %d",
                  kind->name, source.device, destination.device);
    }
    return problem;
  }

  // Returns whether the caller must wait for the copy, because its host memory is pageable and may be freed
  // before the stream executes the copy.
  bool needs_pinning() const {
    return (source.device < 0 && !source.pinned) || (destination.device < 0 && !destination.pinned);
  }

  void run() const { std::memmove(destination.usable, source.usable, source.bytes); }
};

aclError prepare(const char* call, Copy* copy, void* destination, size_t room, const void* source,
                 size_t bytes, aclrtMemcpyKind kind) {
  const auto index = static_cast<size_t>(kind);
  if (index >= sizeof kKinds / sizeof *kKinds) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, text("%s: %zu is no kind of copy", call, index));
  }
  if (bytes > room) {
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                text("%s: %zu bytes do not fit into the %zu of the destination", call, bytes, room));
  }
  copy->destination = {"destination", destination, bytes};
  copy->source = {"source", const_cast<void*>(source), bytes};
  copy->kind = &kKinds[index];
  const std::string problem = copy->resolve_both();
  if (!problem.empty()) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, text("%s: %s", call, problem.c_str()));
  }
  return ACL_SUCCESS;
}

// Executes a copy when the stream reaches it. If the caller has freed the memory by then, which is an error,
// the exception puts the device into error.
void run_later(Copy copy) {
  const bool was_pinned[2] = {copy.destination.pinned, copy.source.pinned};
  std::string problem = copy.resolve_both();
  if (problem.empty() && (was_pinned[0] > copy.destination.pinned || was_pinned[1] > copy.source.pinned)) {
    problem = "pinned host memory was freed";
  }
  if (!problem.empty()) {
    throw std::runtime_error(problem + " (it was right when the copy was put on the stream)");
  }
  copy.run();
}

aclError fill(const char* call, End* end, void* address, size_t room, size_t bytes) {
  if (bytes > room) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, text("%s: %zu bytes do not fit into %zu", call, bytes, room));
  }
  *end = {"memory", address, bytes};
  const std::string problem = resolve(end, Place::kAny, "");
  return problem.empty() ? ACL_SUCCESS
                         : fail(ACL_ERROR_RT_PARAM_INVALID, text("%s: %s", call, problem.c_str()));
}

}  // namespace
}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

// Copies immediately. Does not wait for any stream.
aclError aclrtMemcpy(void* destination, size_t room, const void* source, size_t bytes, aclrtMemcpyKind kind) {
  int device;
  if (const aclError error = use_current_device(&device)) {
    return error;
  }
  if (bytes == 0) {
    return ACL_SUCCESS;
  }
  Copy copy;
  if (const aclError error = prepare("aclrtMemcpy", &copy, destination, room, source, bytes, kind)) {
    return error;
  }
  on_call();
  trace("aclrtMemcpy: %zu bytes to %p from %p, %s", bytes, destination, source, copy.kind->name);
  copy.run();
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* destination, size_t room, const void* source, size_t bytes,
                          aclrtMemcpyKind kind, aclrtStream stream) {
  std::shared_ptr<Stream> found;
  if (const aclError error = find_stream("aclrtMemcpyAsync", stream, &found)) {
    return error;
  }
  if (bytes == 0) {
    return ACL_SUCCESS;
  }
  Copy copy;
  if (const aclError error = prepare("aclrtMemcpyAsync", &copy, destination, room, source, bytes, kind)) {
    return error;
  }
  trace("aclrtMemcpyAsync: stream %d, %zu bytes to %p from %p, %s", found->id, bytes, destination, source,
        copy.kind->name);
  Point end;
  const aclError error =
      submit("aclrtMemcpyAsync", stream, make_task("aclrtMemcpyAsync", [copy] { run_later(copy); }), &end);
  if (error != ACL_SUCCESS || !copy.needs_pinning()) {
    return error;
  }
  wait_for({end}, kNever);
  return check_device(found->device);
}

aclError aclrtMemset(void* address, size_t room, int32_t value, size_t bytes) {
  int device;
  if (const aclError error = use_current_device(&device)) {
    return error;
  }
  End end;
  if (const aclError error = fill("aclrtMemset", &end, address, room, bytes)) {
    return error;
  }
  std::memset(end.usable, value, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* address, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  End end;
  if (const aclError error = fill("aclrtMemsetAsync", &end, address, room, bytes)) {
    return error;
  }
  return submit("aclrtMemsetAsync", stream, make_task("aclrtMemsetAsync", [end, value]() mutable {
                  const std::string problem = resolve(&end, Place::kAny, "");
                  if (!problem.empty()) {
                    throw std::runtime_error(problem);
                  }
                  std::memset(end.usable, value, end.bytes);
                }));
}
