// Copies of every kind, their order, and copies that are rejected.
#include <chrono>
#include <numeric>
#include <thread>

#include "support.h"

namespace {

std::vector<int> counted(size_t count, int first) {
  std::vector<int> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

void test_every_kind() {
  constexpr size_t kCount = 1000, kBytes = kCount * sizeof(int);
  const std::vector<int> values = counted(kCount, 1);
  int* a = to_device(values);
  int* b = device_memory<int>(kCount);
  CHECK(aclrtSetDevice(1) == ACL_SUCCESS);
  int* other = device_memory<int>(kCount);
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
  CHECK(aclrtMemcpy(b, kBytes, a, kBytes, ACL_MEMCPY_INNER_DEVICE_TO_DEVICE) == ACL_SUCCESS);
  CHECK(to_host(b, kCount) == values);
  CHECK(aclrtMemcpy(other, kBytes, b, kBytes, ACL_MEMCPY_INTER_DEVICE_TO_DEVICE) == ACL_SUCCESS);
  CHECK(to_host(other, kCount) == values);
  CHECK(aclrtMemcpy(b + 1, kBytes, other, 4, ACL_MEMCPY_DEVICE_TO_DEVICE) == ACL_SUCCESS);
  CHECK(to_host(b, 3) == (std::vector<int>{1, 1, 3}));
  std::vector<int> host(kCount);
  CHECK(aclrtMemcpy(host.data(), kBytes, other, kBytes, ACL_MEMCPY_DEFAULT) == ACL_SUCCESS);
  CHECK(host == values);
  CHECK(aclrtMemcpy(host.data(), kBytes, values.data() + 1, 4, ACL_MEMCPY_HOST_TO_HOST) == ACL_SUCCESS);
  CHECK(host[0] == 2);
  CHECK(aclrtMemcpy(b, kBytes, host.data(), kBytes, ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE) == ACL_SUCCESS);
  CHECK(to_host(b, kCount) == host);
  CHECK(aclrtMemcpy(nullptr, 0, nullptr, 0, ACL_MEMCPY_HOST_TO_DEVICE) == ACL_SUCCESS);
  for (int* memory : {a, b, other}) {
    CHECK(aclrtFree(memory) == ACL_SUCCESS);
  }
}

// Copies on one stream run one after the other, while the host runs ahead.
void test_order_on_a_stream() {
  constexpr size_t kCount = 20000, kBytes = kCount * sizeof(int);
  constexpr int kRounds = 200;
  const aclrtStream stream = new_stream();
  int* device = device_memory<int>(kCount);
  int* source = pinned_memory<int>(kCount * 2);
  int* result = pinned_memory<int>(kCount * kRounds);
  for (size_t i = 0; i < kCount; ++i) {
    source[i] = 1;
    source[kCount + i] = 2;
  }
  for (int round = 0; round < kRounds; ++round) {
    const int* from = source + kCount * (round % 2);
    CHECK(aclrtMemcpyAsync(device, kBytes, from, kBytes, ACL_MEMCPY_HOST_TO_DEVICE, stream) == ACL_SUCCESS);
    CHECK(aclrtMemsetAsync(device, kBytes, 0, 4, stream) == ACL_SUCCESS);
    CHECK(aclrtMemcpyAsync(result + kCount * round, kBytes, device, kBytes, ACL_MEMCPY_DEVICE_TO_HOST,
                           stream) == ACL_SUCCESS);
  }
  CHECK(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  for (int round = 0; round < kRounds; ++round) {
    const int* row = result + kCount * round;
    CHECK(row[0] == 0 && row[1] == 1 + round % 2 && row[kCount - 1] == 1 + round % 2);
  }
  CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
  CHECK(aclrtFree(device) == ACL_SUCCESS);
  CHECK(aclrtFreeHost(source) == ACL_SUCCESS);
  CHECK(aclrtFreeHost(result) == ACL_SUCCESS);
}

// A copy of pageable memory has ended when the call returns; a copy of pinned memory may not have.
void test_pageable_memory_is_waited_for() {
  const aclrtStream stream = new_stream();
  char* device = device_memory(100);
  char* pinned = pinned_memory(100);
  const auto nap = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  aclrtStreamStatus status;
  rec_sdk::emulator::on_stream(stream, "nap", nap);
  CHECK(aclrtMemcpyAsync(device, 100, pinned, 100, ACL_MEMCPY_HOST_TO_DEVICE, stream) == ACL_SUCCESS);
  CHECK(aclrtStreamQuery(stream, &status) == ACL_SUCCESS && status == ACL_STREAM_STATUS_NOT_READY);
  std::vector<char> pageable(100, 'x');
  CHECK(aclrtMemcpyAsync(device, 100, pageable.data(), 100, ACL_MEMCPY_HOST_TO_DEVICE, stream) ==
        ACL_SUCCESS);
  CHECK(aclrtStreamQuery(stream, &status) == ACL_SUCCESS && status == ACL_STREAM_STATUS_COMPLETE);
  CHECK(aclrtHostRegisterV2(pageable.data(), 100, ACL_HOST_REG_PINNED) == ACL_SUCCESS);
  rec_sdk::emulator::on_stream(stream, "nap", nap);
  CHECK(aclrtMemcpyAsync(pageable.data(), 100, device, 100, ACL_MEMCPY_DEVICE_TO_HOST, stream) ==
        ACL_SUCCESS);
  CHECK(aclrtStreamQuery(stream, &status) == ACL_SUCCESS && status == ACL_STREAM_STATUS_NOT_READY);
  CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
  CHECK(aclrtHostUnregister(pageable.data()) == ACL_SUCCESS);
  CHECK(aclrtHostUnregister(pageable.data()) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(aclrtFree(device) == ACL_SUCCESS);
  CHECK(aclrtFreeHost(pinned) == ACL_SUCCESS);
}

void check_refused(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                   const char* message) {
  CHECK(aclrtMemcpy(to, room, from, bytes, kind) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(message_has(message));
  CHECK(aclrtMemcpyAsync(to, room, from, bytes, kind, nullptr) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(message_has(message));
}

void test_refused() {
  char* device = device_memory(100);
  char* neighbour = device_memory(100);
  CHECK(aclrtSetDevice(1) == ACL_SUCCESS);
  char* other = device_memory(100);
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
  char* pinned = pinned_memory(100);
  char host[200];
  check_refused(host, 200, device, 100, ACL_MEMCPY_HOST_TO_DEVICE, "destination, 100 bytes at");
  check_refused(host, 200, device, 100, ACL_MEMCPY_HOST_TO_DEVICE,
                "is not device memory, but the kind is ACL_MEMCPY_H");
  check_refused(device, 100, neighbour, 100, ACL_MEMCPY_HOST_TO_DEVICE, "source, 100 bytes at");
  check_refused(device, 100, neighbour, 100, ACL_MEMCPY_DEVICE_TO_HOST, "destination, 100 bytes at");
  check_refused(device, 100, host, 100, ACL_MEMCPY_DEVICE_TO_DEVICE, "source, 100 bytes at");
  check_refused(device, 100, other, 100, ACL_MEMCPY_INNER_DEVICE_TO_DEVICE,
                "source is on device 1 and the dest");
  check_refused(device, 100, host, 101, ACL_MEMCPY_HOST_TO_DEVICE, "101 bytes do not fit into the 100");
  check_refused(device, 200, host, 101, ACL_MEMCPY_HOST_TO_DEVICE,
                "is not inside one live allocation; there is an");
  check_refused(device + 50, 200, host, 51, ACL_MEMCPY_HOST_TO_DEVICE,
                "50 bytes before and ends 50 bytes behind");
  check_refused(host, 200, device + 600, 100, ACL_MEMCPY_DEVICE_TO_HOST, "is not inside one live allocation");
  check_refused(pinned + 50, 200, device, 51, ACL_MEMCPY_DEVICE_TO_HOST,
                "not inside one allocation of host memory");
  check_refused(nullptr, 100, device, 100, ACL_MEMCPY_DEVICE_TO_HOST,
                "not inside one allocation of host memory");
  check_refused(device, 100, host, 100, static_cast<aclrtMemcpyKind>(99), "99 is no kind of copy");
  CHECK(aclrtMemset(device, 200, 0, 101) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(message_has("is not inside one live allocation"));
  CHECK(aclrtFree(neighbour) == ACL_SUCCESS);
  check_refused(device, 100, neighbour, 1, ACL_MEMCPY_DEVICE_TO_DEVICE, "no live allocation of device 0");
  for (char* memory : {device, other}) {
    CHECK(aclrtFree(memory) == ACL_SUCCESS);
  }
  CHECK(aclrtFreeHost(pinned) == ACL_SUCCESS);
}

// Memory freed while a copy of it is queued: an error of the device when the copy runs.
void test_freed_too_early(bool host) {
  char* device = device_memory(100);
  char* pinned = pinned_memory(100);
  rec_sdk::emulator::on_stream(nullptr, "nap",
                               [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
  CHECK(aclrtMemcpyAsync(device, 100, pinned, 100, ACL_MEMCPY_HOST_TO_DEVICE, nullptr) == ACL_SUCCESS);
  CHECK((host ? aclrtFreeHost(pinned) : aclrtFree(device)) == ACL_SUCCESS);
  CHECK(aclrtSynchronizeStream(nullptr) == ACL_ERROR_RT_VECTOR_CORE_EXCEPTION);
  const std::string message = aclGetRecentErrMsg();
  CHECK(contains(message, host ? "pinned host memory was freed" : "is not inside one live allocation"));
  CHECK(contains(message, "it was right when the copy was put on the stream"));
  CHECK((host ? aclrtFree(device) : aclrtFreeHost(pinned)) == ACL_SUCCESS);
  CHECK(aclrtResetDevice(0) == ACL_SUCCESS);
}

}  // namespace

int main() {
  start();
  test_every_kind();
  test_order_on_a_stream();
  test_pageable_memory_is_waited_for();
  test_refused();
  test_freed_too_early(false);
  test_freed_too_early(true);
  return check_result();
}
