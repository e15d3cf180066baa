// Device memory: addresses, contents, and exhaustion.
#include <random>
#include <thread>

#include "support.h"

namespace {

size_t free_bytes() {
  size_t free = 0, total = 0;
  CHECK(aclrtGetMemInfo(ACL_HBM_MEM, &free, &total) == ACL_SUCCESS);
  CHECK(total == kMemory);
  return free;
}

void test_fresh_memory_is_poisoned() {
  for (int round = 0; round < 2; ++round) {  // the second time, reused memory
    unsigned char* memory = device_memory<unsigned char>(10000);
    CHECK(reinterpret_cast<uintptr_t>(memory) % 512 == 0);
    for (const unsigned char byte : to_host(memory, 10000)) {
      CHECK(byte == 0xFF);
    }
    CHECK(aclrtMemset(memory, 10000, 7, 10000) == ACL_SUCCESS);
    CHECK(to_host(memory, 10000)[9999] == 7);
    CHECK(aclrtFree(memory) == ACL_SUCCESS);
  }
}

// Neighbours in one page: freed memory is poisoned again, other memory keeps its contents.
void test_freed_memory_is_poisoned() {
  std::vector<unsigned char*> small;
  for (int i = 0; i < 40; ++i) {
    small.push_back(device_memory<unsigned char>(300));
    CHECK(aclrtMemset(small.back(), 300, i + 1, 300) == ACL_SUCCESS);
  }
  std::vector<const unsigned char*> held;
  for (unsigned char* memory : small) {
    held.push_back(static_cast<unsigned char*>(rec_sdk_emulator_host_address(memory, 300)));
  }
  for (size_t i = 0; i < small.size(); i += 2) {
    CHECK(aclrtFree(small[i]) == ACL_SUCCESS);
  }
  for (size_t i = 0; i < small.size(); ++i) {
    CHECK(held[i][0] == (i % 2 ? i + 1 : 0xFF) && held[i][299] == held[i][0]);
  }
  for (size_t i = 1; i < small.size(); i += 2) {
    CHECK(aclrtFree(small[i]) == ACL_SUCCESS);
  }
}

// Memory that is never written takes no host memory.
void test_untouched_memory_is_free() {
  const auto resident_pages = [] {
    long all = 0, resident = 0;
    std::FILE* file = std::fopen("/proc/self/statm", "r");
    CHECK(file != nullptr && std::fscanf(file, "%ld %ld", &all, &resident) == 2);
    std::fclose(file);
    return resident;
  };
  const long before = resident_pages();
  char* memory = device_memory(kMemory);
  CHECK(kSanitized || resident_pages() - before < 1000);
  CHECK(aclrtMemset(memory, kMemory, 0, kMemory) == ACL_SUCCESS);
  CHECK(resident_pages() - before > 10000);
  CHECK(aclrtFree(memory) == ACL_SUCCESS);
  CHECK(kSanitized || resident_pages() - before < 1000);
}

void test_out_of_memory() {
  const size_t before = free_bytes();
  CHECK(before == kMemory);
  char* half = device_memory(kMemory / 2);
  CHECK(free_bytes() == kMemory / 2);
  void* more = &more;
  CHECK(aclrtMalloc(&more, kMemory / 2 + 1, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_ERROR_RT_MEMORY_ALLOCATION);
  CHECK(more == nullptr);
  CHECK(
      message_has("device 0, 33554433 bytes asked for, out of memory: 33554432 bytes of 67108864 are free"));
  // The other device has its own.
  CHECK(aclrtSetDevice(1) == ACL_SUCCESS);
  CHECK(free_bytes() == kMemory);
  char* other = device_memory(kMemory);
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
  CHECK(aclrtFree(half) == ACL_SUCCESS);
  CHECK(aclrtFree(other) == ACL_SUCCESS);  // also from a thread of another device
  CHECK(free_bytes() == kMemory);
  CHECK(aclrtFree(device_memory(kMemory)) == ACL_SUCCESS);
}

void test_wrong_calls() {
  void* address = nullptr;
  CHECK(aclrtMalloc(&address, 0, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_ERROR_RT_PARAM_INVALID);
  char* memory = device_memory(1000);
  CHECK(aclrtFree(memory + 512) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(message_has("begins 512 bytes before and ends 488 bytes behind"));
  CHECK(aclrtFree(memory) == ACL_SUCCESS);
  CHECK(aclrtFree(memory) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(message_has("no live allocation of device 0"));
  CHECK(aclrtFree(&address) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(message_has("host memory"));
  CHECK(aclrtFree(nullptr) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(aclrtFreeHost(&address) == ACL_ERROR_RT_PARAM_INVALID);
}

void test_host_address() {
  char* memory = device_memory(1000);
  char* other = device_memory(1000);
  CHECK(rec_sdk_emulator_host_address(memory, 1000) != nullptr);
  CHECK(rec_sdk_emulator_host_address(memory, 1000) != memory);
  CHECK(rec_sdk_emulator_host_address(memory + 999, 1) ==
        static_cast<char*>(rec_sdk_emulator_host_address(memory, 0)) + 999);
  CHECK(rec_sdk_emulator_host_address(memory + 1000, 0) != nullptr);
  CHECK(rec_sdk_emulator_host_address(memory, 1001) == nullptr);
  CHECK(rec_sdk_emulator_host_address(memory + 1000, 1) == nullptr);
  CHECK(rec_sdk_emulator_host_address(memory, UINT64_MAX) == nullptr);
  CHECK(rec_sdk_emulator_host_address(&memory, 1) == nullptr);
  CHECK(rec_sdk_emulator_host_address(nullptr, 0) == nullptr);
  CHECK(aclrtFree(memory) == ACL_SUCCESS);
  CHECK(rec_sdk_emulator_host_address(memory, 1) == nullptr);
  CHECK(aclrtFree(other) == ACL_SUCCESS);
}

void test_pointer_attributes() {
  char* pinned = pinned_memory(100);
  CHECK(aclrtSetDevice(1) == ACL_SUCCESS);
  char* memory = device_memory(100);
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
  aclrtPtrAttributes attributes;
  CHECK(aclrtPointerGetAttributes(memory, &attributes) == ACL_SUCCESS);
  CHECK(attributes.location.type == ACL_MEM_LOCATION_TYPE_DEVICE && attributes.location.id == 1);
  CHECK(aclrtPointerGetAttributes(pinned + 99, &attributes) == ACL_SUCCESS);
  CHECK(attributes.location.type == ACL_MEM_LOCATION_TYPE_HOST);
  CHECK(aclrtPointerGetAttributes(&memory, &attributes) == ACL_SUCCESS);
  CHECK(attributes.location.type == ACL_MEM_LOCATION_TYPE_UNREGISTERED);
  CHECK(aclrtFreeHost(pinned) == ACL_SUCCESS);
  CHECK(aclrtFree(memory) == ACL_SUCCESS);
}

// Allocations never share a byte, and keep what was written to them.
void test_random_allocations() {
  struct Live {
    unsigned char* memory;
    size_t bytes;
    unsigned char value;
  };
  std::mt19937 random(1);
  std::vector<Live> live;
  for (int step = 0; step < 2000; ++step) {
    if (live.empty() || random() % 100 < 60) {
      const size_t bytes = 1 + (random() % 10 == 0 ? random() % (16 << 20) : random() % 5000);
      void* memory = nullptr;
      const size_t free = free_bytes();
      const aclError error = aclrtMalloc(&memory, bytes, ACL_MEM_MALLOC_HUGE_FIRST);
      CHECK(error == ACL_SUCCESS || error == ACL_ERROR_RT_MEMORY_ALLOCATION);
      if (error == ACL_SUCCESS) {
        CHECK(free - free_bytes() == (bytes + 511) / 512 * 512);
        const auto value = static_cast<unsigned char>(random());
        CHECK(aclrtMemset(memory, bytes, value, bytes) == ACL_SUCCESS);
        live.push_back({static_cast<unsigned char*>(memory), bytes, value});
      }
    } else {
      const size_t which = random() % live.size();
      const Live one = live[which];
      live[which] = live.back();
      live.pop_back();
      const auto* held = static_cast<unsigned char*>(rec_sdk_emulator_host_address(one.memory, one.bytes));
      CHECK(held[0] == one.value && held[one.bytes / 2] == one.value && held[one.bytes - 1] == one.value);
      CHECK(aclrtFree(one.memory) == ACL_SUCCESS);
    }
  }
  for (const Live& one : live) {
    CHECK(aclrtFree(one.memory) == ACL_SUCCESS);
  }
  CHECK(free_bytes() == kMemory);
}

// A new thread has no device, whatever other threads chose.
void test_no_device_chosen() {
  std::thread([] {
    void* memory = nullptr;
    int32_t device = 0;
    CHECK(aclrtGetDevice(&device) == ACL_ERROR_RT_CONTEXT_NULL);
    CHECK(aclrtMalloc(&memory, 1, ACL_MEM_MALLOC_HUGE_FIRST) == ACL_ERROR_RT_CONTEXT_NULL);
    CHECK(message_has("this thread has no device"));
    CHECK(aclrtSetDevice(2) == ACL_ERROR_RT_INVALID_DEVICEID);
    CHECK(message_has("there is no device 2; the emulator has 2, 0 to 1"));
  }).join();
}

}  // namespace

int main() {
  start();
  test_fresh_memory_is_poisoned();
  test_freed_memory_is_poisoned();
  test_untouched_memory_is_free();
  test_out_of_memory();
  test_wrong_calls();
  test_host_address();
  test_pointer_attributes();
  test_random_allocations();
  test_no_device_chosen();
  return check_result();
}
