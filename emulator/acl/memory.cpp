#include "memory.h"

#include <acl/acl.h>

#include <memory>
#include <mutex>
#include <string>

#include "addresses.h"
#include "devices.h"
#include "errors.h"
#include "live_memory.h"
#include "poison.h"
#include "range_allocator.h"
#include "settings.h"

namespace rec_sdk::emulator {
namespace {

using Lock = std::lock_guard<std::mutex>;

class DeviceMemory {
 public:
  // Returns the address of the allocated memory; if there is not enough memory, returns null and stores a
  // reason.
  char* allocate(int device, uint64_t bytes, std::string* reason) {
    const Lock lock(mutex_);
    if (begin_ == nullptr && !reserve(device)) {
      *reason =
          text("this process cannot reserve %llu bytes of addresses; REC_SDK_EMULATED_MEMORY makes it less",
               static_cast<unsigned long long>(2 * settings().memory));
      return nullptr;
    }
    const uint64_t offset = bytes <= free() ? allocator_->allocate(bytes) : RangeAllocator::kNone;
    if (offset == RangeAllocator::kNone) {
      *reason =
          text("out of memory: %llu bytes of %llu are free, %llu in one piece (REC_SDK_EMULATED_MEMORY)",
               static_cast<unsigned long long>(free()), static_cast<unsigned long long>(settings().memory),
               static_cast<unsigned long long>(allocator_->largest_free()));
      return nullptr;
    }
    return begin_ + offset;
  }

  // Frees memory and fills it with poison. Reads after it is freed, or before its next user writes it, then
  // give NaN or -1.
  void release(char* address, uint64_t bytes) {
    const Lock lock(mutex_);
    poison_again(address + distance_, RangeAllocator::aligned(bytes));
    allocator_->release(static_cast<uint64_t>(address - begin_));
  }

  bool take_physical(uint64_t bytes) {
    const Lock lock(mutex_);
    if (bytes > free()) {
      return false;
    }
    physical_ += bytes;
    return true;
  }

  void return_physical(uint64_t bytes) {
    const Lock lock(mutex_);
    physical_ -= bytes;
  }

  uint64_t free_bytes() {
    const Lock lock(mutex_);
    return free();
  }

 private:
  bool reserve(int device) {
    char* begin = reserve_addresses(settings().memory, device);
    if (begin == nullptr) {
      return false;
    }
    distance_ = range_of(begin).bytes;
    if (!map_poisoned(begin + distance_, distance_)) {
      release_addresses(begin);
      return false;
    }
    begin_ = begin;
    allocator_ = std::make_unique<RangeAllocator>(settings().memory);
    return true;
  }

  uint64_t free() const {
    return settings().memory - physical_ - (allocator_ == nullptr ? 0 : allocator_->used());
  }

  std::mutex mutex_;
  char* begin_ = nullptr;
  uint64_t distance_ = 0;  // distance from an address to its contents
  std::unique_ptr<RangeAllocator> allocator_;
  uint64_t physical_ = 0;
};

// This object is never destroyed, because streams still run while the process ends.
DeviceMemory* const memories = new DeviceMemory[kMaxDevices];

}  // namespace

bool take_physical_memory(int device, uint64_t bytes) { return memories[device].take_physical(bytes); }
void return_physical_memory(int device, uint64_t bytes) { memories[device].return_physical(bytes); }
uint64_t free_memory(int device) { return memories[device].free_bytes(); }

}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
  *address = nullptr;
  int device;
  if (const aclError error = use_current_device(&device)) {
    return error;
  }
  if (bytes == 0) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMalloc: 0 bytes asked for");
  }
  std::string reason;
  char* memory = memories[device].allocate(device, bytes, &reason);
  if (memory == nullptr) {
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                text("aclrtMalloc: device %d, %zu bytes asked for, %s", device, bytes, reason.c_str()));
  }
  add_live_memory(memory, {bytes, device, false});
  trace("aclrtMalloc: device %d, %zu bytes at %p", device, bytes, static_cast<void*>(memory));
  *address = memory;
  return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, bytes, policy);
}

// Does not wait for streams, like the hardware. Work that still uses the memory fails when it runs.
aclError aclrtFree(void* address) {
  if (address == nullptr) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFree: the address is null");
  }
  const LiveMemory memory = remove_live_memory(address, false);
  if (memory.device < 0) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, text("aclrtFree: %p is not the begin of an allocation, but in %s",
                                                 address, describe(address).c_str()));
  }
  trace("aclrtFree: device %d, %llu bytes at %p", memory.device,
        static_cast<unsigned long long>(memory.bytes), address);
  memories[memory.device].release(static_cast<char*>(address), memory.bytes);
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  int device;
  if (const aclError error = use_current_device(&device)) {
    return error;
  }
  *free = free_memory(device);
  *total = settings().memory;
  return ACL_SUCCESS;
}
