// Reserved address ranges, physical memory, and mappings between them, as used by torch_npu's expandable
// segments.
#include <acl/acl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_set>

#include "addresses.h"
#include "devices.h"
#include "errors.h"
#include "live_memory.h"
#include "memory.h"
#include "poison.h"
#include "settings.h"

namespace rec_sdk::emulator {
namespace {

constexpr size_t kGranularity = size_t{2} << 20;  // the size of large pages on hardware

struct Physical {
  int file;
  uint64_t bytes;
  int device;
};

// This object is never destroyed, because frameworks free memory while the process ends.
std::mutex& physical_mutex = *new std::mutex;
std::unordered_set<Physical*>& physicals = *new std::unordered_set<Physical*>;

// Creates a memory file that is filled with poison and can be mapped at any address; returns -1 if there is
// not enough memory.
int poisoned_file(size_t bytes) {
  const int file = memfd_create("rec_sdk_npu_memory", MFD_CLOEXEC);
  if (file < 0) {
    return -1;
  }
  void* contents = MAP_FAILED;
  if (ftruncate(file, static_cast<off_t>(bytes)) == 0) {
    contents = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (contents == MAP_FAILED) {
    close(file);
    return -1;
  }
  std::memset(contents, kPoison, bytes);
  munmap(contents, bytes);
  return file;
}

bool find_physical(aclrtDrvMemHandle handle, Physical* found) {
  const std::lock_guard<std::mutex> lock(physical_mutex);
  auto* physical = static_cast<Physical*>(handle);
  if (physicals.count(physical) == 0) {
    return false;
  }
  *found = *physical;
  return true;
}

aclError unknown_handle(const char* call, aclrtDrvMemHandle handle) {
  return fail(ACL_ERROR_RT_INVALID_HANDLE, text("%s: %p is no physical memory", call, handle));
}

}  // namespace
}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, aclrtMemGranularityOptions,
                                          size_t* granularity) {
  *granularity = kGranularity;
  return ACL_SUCCESS;
}

aclError aclrtReserveMemAddress(void** address, size_t bytes, size_t, void*, uint64_t) {
  // torch_npu calls this before it chooses a device. The device is determined later, by the physical memory
  // that is mapped.
  const int device = std::max(current_device(), 0);
  *address = reserve_addresses(bytes, device);
  if (*address == nullptr) {
    return fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL,
                text("aclrtReserveMemAddress: no range of %zu bytes left", bytes));
  }
  trace("aclrtReserveMemAddress: device %d, %zu bytes at %p", device, bytes, *address);
  return ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void* address) {
  const AddressRange range = range_of(address);
  if (range.device < 0 || range.begin != reinterpret_cast<uintptr_t>(address)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                text("aclrtReleaseMemAddress: %p is not the begin of a reserved range", address));
  }
  trace("aclrtReleaseMemAddress: %p", address);
  release_addresses(static_cast<char*>(address));
  return ACL_SUCCESS;
}

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp* properties,
                             uint64_t) {
  const int device = static_cast<int>(properties->location.id);
  *handle = nullptr;
  aclError error = check_device_id("aclrtMallocPhysical", device);
  if (error == ACL_SUCCESS) {
    error = check_device(device);
  }
  if (error != ACL_SUCCESS) {
    return error;
  }
  if (properties->location.type != ACL_MEM_LOCATION_TYPE_DEVICE) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtMallocPhysical: only memory of devices is emulated");
  }
  if (!take_physical_memory(device, bytes)) {
    return fail(
        ACL_ERROR_RT_MEMORY_ALLOCATION,
        text("aclrtMallocPhysical: device %d, %zu bytes asked for, out of memory: %llu bytes of %llu are "
             "free (REC_SDK_EMULATED_MEMORY)",
             device, bytes, static_cast<unsigned long long>(free_memory(device)),
             static_cast<unsigned long long>(settings().memory)));
  }
  const int file = poisoned_file(bytes);
  if (file < 0) {
    return_physical_memory(device, bytes);
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                text("aclrtMallocPhysical: the host has no %zu bytes", bytes));
  }
  auto* physical = new Physical{file, bytes, device};
  const std::lock_guard<std::mutex> lock(physical_mutex);
  physicals.insert(physical);
  *handle = physical;
  return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  auto* physical = static_cast<Physical*>(handle);
  {
    const std::lock_guard<std::mutex> lock(physical_mutex);
    if (physicals.erase(physical) == 0) {
      return unknown_handle("aclrtFreePhysical", handle);
    }
  }
  close(physical->file);
  return_physical_memory(physical->device, physical->bytes);
  delete physical;
  return ACL_SUCCESS;
}

aclError aclrtMapMem(void* address, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  Physical physical;
  if (!find_physical(handle, &physical)) {
    return unknown_handle("aclrtMapMem", handle);
  }
  const AddressRange range = range_of(address);
  const uint64_t start = reinterpret_cast<uintptr_t>(address) - range.begin;
  if (range.device < 0 || bytes > range.bytes - start || offset > physical.bytes ||
      bytes > physical.bytes - offset) {
    return fail(ACL_ERROR_RT_PARAM_INVALID,
                text("aclrtMapMem: %zu bytes from %zu of %llu at %p do not fit into the memory or the range",
                     bytes, offset, static_cast<unsigned long long>(physical.bytes), address));
  }
  void* behind = static_cast<char*>(address) + range.bytes;
  if (mmap(behind, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical.file,
           static_cast<off_t>(offset)) == MAP_FAILED) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, text("aclrtMapMem: %p cannot be mapped", address));
  }
  add_live_memory(address, {bytes, physical.device, true});
  trace("aclrtMapMem: device %d, %zu bytes at %p", physical.device, bytes, address);
  return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void* address) {
  const LiveMemory memory = remove_live_memory(address, true);
  if (memory.device < 0) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, text("aclrtUnmapMem: nothing is mapped at %p", address));
  }
  // Maps inaccessible memory in place of the old mapping, so that the addresses stay reserved.
  mmap(static_cast<char*>(address) + range_of(address).bytes, memory.bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  trace("aclrtUnmapMem: device %d at %p", memory.device, address);
  return ACL_SUCCESS;
}

static aclError no_sharing(const char* call) {
  return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
              text("%s: device memory shared between processes is not emulated", call));
}

aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*) {
  return no_sharing("aclrtMemExportToShareableHandle");
}

aclError aclrtMemImportFromShareableHandle(uint64_t, int32_t, aclrtDrvMemHandle*) {
  return no_sharing("aclrtMemImportFromShareableHandle");
}

aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) {
  return no_sharing("aclrtMemSetPidToShareableHandle");
}
