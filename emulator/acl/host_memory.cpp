#include "host_memory.h"

#include <acl/acl.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "addresses.h"
#include "errors.h"
#include "live_memory.h"

namespace rec_sdk::emulator {
namespace {

struct Pinned {
  uint64_t bytes;
  bool ours;  // whether aclrtMallocHost() allocated it; otherwise it was registered
};

// This object is never destroyed, because frameworks free memory while the process ends.
std::shared_mutex& pinned_mutex = *new std::shared_mutex;
std::map<uintptr_t, Pinned>& pinned = *new std::map<uintptr_t, Pinned>;

void add_pinned(const void* address, const Pinned& memory) {
  const std::unique_lock<std::shared_mutex> lock(pinned_mutex);
  pinned[reinterpret_cast<uintptr_t>(address)] = memory;
}

bool remove_pinned(const void* address, bool ours) {
  const std::unique_lock<std::shared_mutex> lock(pinned_mutex);
  const auto memory = pinned.find(reinterpret_cast<uintptr_t>(address));
  if (memory == pinned.end() || memory->second.ours != ours) {
    return false;
  }
  pinned.erase(memory);
  return true;
}

}  // namespace

HostMemory host_memory_at(const void* address, uint64_t bytes) {
  const std::shared_lock<std::shared_mutex> lock(pinned_mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  auto memory = pinned.upper_bound(begin);
  if (memory == pinned.begin()) {
    return HostMemory::kPageable;
  }
  --memory;
  const uintptr_t end = memory->first + memory->second.bytes;
  if (begin >= end) {
    return HostMemory::kPageable;
  }
  return bytes <= end - begin ? HostMemory::kPinned : HostMemory::kPartlyPinned;
}

}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

aclError aclrtMallocHost(void** address, size_t bytes) {
  constexpr size_t kAlignment = 4096;
  *address = nullptr;
  if (bytes == 0) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMallocHost: 0 bytes asked for");
  }
  if (bytes > SIZE_MAX - kAlignment || posix_memalign(address, kAlignment, bytes) != 0) {
    *address = nullptr;
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, text("aclrtMallocHost: the host has no %zu bytes", bytes));
  }
  add_pinned(*address, {bytes, true});
  trace("aclrtMallocHost: %zu bytes at %p", bytes, *address);
  return ACL_SUCCESS;
}

aclError aclrtMallocHostWithCfg(void** address, uint64_t bytes, aclrtMallocConfig*) {
  return aclrtMallocHost(address, bytes);
}

aclError aclrtFreeHost(void* address) {
  if (!remove_pinned(address, true)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, text("aclrtFreeHost: %p is not from aclrtMallocHost()", address));
  }
  trace("aclrtFreeHost: %p", address);
  std::free(address);
  return ACL_SUCCESS;
}

aclError aclrtHostRegisterV2(void* address, uint64_t bytes, uint32_t flags) {
  if (flags != ACL_HOST_REG_PINNED) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                text("aclrtHostRegisterV2: flags 0x%x; only pinning (0x%lx) is emulated", flags,
                     ACL_HOST_REG_PINNED));
  }
  if (address == nullptr || bytes == 0 || is_device_address(address)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, text("aclrtHostRegisterV2: %p is no host memory", address));
  }
  add_pinned(address, {bytes, false});
  return ACL_SUCCESS;
}

aclError aclrtHostRegister(void*, uint64_t, aclrtHostRegisterType, void**) {
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
              "aclrtHostRegister: host memory with device addresses is not emulated");
}

aclError aclrtHostUnregister(void* address) {
  if (!remove_pinned(address, false)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, text("aclrtHostUnregister: %p is not registered", address));
  }
  return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  *attributes = {};
  const AddressRange range = range_of(address);
  if (range.device >= 0) {
    attributes->location = {static_cast<uint32_t>(range.device), ACL_MEM_LOCATION_TYPE_DEVICE};
  } else if (host_memory_at(address, 1) == HostMemory::kPinned) {
    attributes->location = {0, ACL_MEM_LOCATION_TYPE_HOST};
  } else {
    attributes->location = {0, ACL_MEM_LOCATION_TYPE_UNREGISTERED};
  }
  return ACL_SUCCESS;
}
