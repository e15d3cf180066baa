// Physical memory mapped into reserved ranges, as torch_npu's expandable segments do it.
#include <sys/wait.h>

#include "support.h"

namespace {

constexpr size_t kPiece = 2 << 20;

aclrtDrvMemHandle physical_memory(size_t bytes) {
  aclrtPhysicalMemProp properties{};
  properties.location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
  aclrtDrvMemHandle handle = nullptr;
  CHECK(aclrtMallocPhysical(&handle, bytes, &properties, 0) == ACL_SUCCESS);
  return handle;
}

size_t free_bytes() {
  size_t free = 0, total = 0;
  CHECK(aclrtGetMemInfo(ACL_HBM_MEM, &free, &total) == ACL_SUCCESS);
  return free;
}

void test_mapping() {
  void* address = nullptr;
  CHECK(aclrtReserveMemAddress(&address, 8 * kPiece, 0, nullptr, 1) == ACL_SUCCESS);
  char* range = static_cast<char*>(address);
  CHECK(free_bytes() == kMemory);
  CHECK(rec_sdk_emulator_host_address(range, 1) == nullptr);
  const aclrtDrvMemHandle a = physical_memory(kPiece), b = physical_memory(kPiece);
  CHECK(free_bytes() == kMemory - 2 * kPiece);
  CHECK(aclrtMapMem(range, kPiece, 0, a, 0) == ACL_SUCCESS);
  CHECK(aclrtMapMem(range + kPiece, kPiece, 0, b, 0) == ACL_SUCCESS);
  // Neighbouring mappings are contiguous memory, which is poisoned.
  CHECK(to_host(range, 2 * kPiece) == std::vector<char>(2 * kPiece, '\xFF'));
  CHECK(rec_sdk_emulator_host_address(range + kPiece - 1, 2) != nullptr);
  CHECK(rec_sdk_emulator_host_address(range, 2 * kPiece + 1) == nullptr);
  CHECK(aclrtMemset(range, 2 * kPiece, 3, 2 * kPiece) == ACL_SUCCESS);
  // Unmapped memory cannot be used; mapped elsewhere, it keeps its contents.
  CHECK(aclrtUnmapMem(range) == ACL_SUCCESS);
  CHECK(rec_sdk_emulator_host_address(range, 1) == nullptr);
  CHECK(rec_sdk_emulator_host_address(range + kPiece, kPiece) != nullptr);
  CHECK(aclrtMapMem(range + 4 * kPiece, kPiece, 0, a, 0) == ACL_SUCCESS);
  CHECK(to_host(range + 4 * kPiece, kPiece) == std::vector<char>(kPiece, 3));
  const Ending ending = in_child([=] { *const_cast<volatile char*>(range + 4 * kPiece) = 1; });
  CHECK(ending.status != 0 && contains(ending.output, "host code touched device memory"));

  CHECK(aclrtUnmapMem(range + kPiece) == ACL_SUCCESS);
  CHECK(aclrtUnmapMem(range + 4 * kPiece) == ACL_SUCCESS);
  CHECK(aclrtFreePhysical(a) == ACL_SUCCESS);
  CHECK(aclrtFreePhysical(b) == ACL_SUCCESS);
  CHECK(aclrtReleaseMemAddress(range) == ACL_SUCCESS);
  CHECK(free_bytes() == kMemory);
}

void test_refused() {
  aclrtPhysicalMemProp properties{};
  properties.location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
  aclrtDrvMemHandle handle = nullptr;
  CHECK(aclrtMallocPhysical(&handle, kMemory + 1, &properties, 0) == ACL_ERROR_RT_MEMORY_ALLOCATION);
  CHECK(message_has("out of memory: 67108864 bytes of 67108864 are free"));
  properties.location.id = 7;
  CHECK(aclrtMallocPhysical(&handle, kPiece, &properties, 0) == ACL_ERROR_RT_INVALID_DEVICEID);
  void* range = nullptr;
  CHECK(aclrtReserveMemAddress(&range, kPiece, 0, nullptr, 1) == ACL_SUCCESS);
  const aclrtDrvMemHandle memory = physical_memory(2 * kPiece);
  CHECK(aclrtMapMem(range, 2 * kPiece, 0, memory, 0) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(aclrtMapMem(&range, kPiece, 0, memory, 0) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(aclrtMapMem(range, kPiece, 0, &range, 0) == ACL_ERROR_RT_INVALID_HANDLE);
  CHECK(aclrtUnmapMem(range) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(aclrtFreePhysical(&range) == ACL_ERROR_RT_INVALID_HANDLE);
  CHECK(aclrtFreePhysical(memory) == ACL_SUCCESS);
  CHECK(aclrtReleaseMemAddress(range) == ACL_SUCCESS);
  CHECK(aclrtReleaseMemAddress(range) == ACL_ERROR_RT_PARAM_INVALID);
  uint64_t shared = 0;
  CHECK(aclrtMemExportToShareableHandle(memory, ACL_MEM_HANDLE_TYPE_NONE, 0, &shared) ==
        ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
  CHECK(message_has("shared between processes is not emulated"));
}

// Allocations and physical memory share the device's memory.
void test_one_limit() {
  char* memory = device_memory(kMemory - kPiece);
  const aclrtDrvMemHandle physical = physical_memory(kPiece);
  void* more = nullptr;
  CHECK(aclrtMalloc(&more, 1, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_ERROR_RT_MEMORY_ALLOCATION);
  CHECK(aclrtFreePhysical(physical) == ACL_SUCCESS);
  CHECK(aclrtFree(device_memory(kPiece)) == ACL_SUCCESS);
  CHECK(aclrtFree(memory) == ACL_SUCCESS);
}

}  // namespace

int main() {
  start();
  test_mapping();
  test_refused();
  test_one_limit();
  return check_result();
}
