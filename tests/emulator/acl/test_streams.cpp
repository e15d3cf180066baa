// A stream runs its work in order, concurrently with other streams and the host.
#include <atomic>
#include <chrono>
#include <thread>

#include "support.h"

using rec_sdk::emulator::on_stream;

namespace {

void nap(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

void test_in_order() {
  const aclrtStream stream = new_stream();
  std::vector<int> seen;
  for (int i = 0; i < 10000; ++i) {
    on_stream(stream, "number", [&seen, i] { seen.push_back(i); });
  }
  CHECK(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  CHECK(seen.size() == 10000);
  for (int i = 0; i < 10000; ++i) {
    CHECK(seen[static_cast<size_t>(i)] == i);
  }
  CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
}

// Two streams that wait for each other within one piece of work each finish only if both run at once.
void test_side_by_side() {
  const aclrtStream a = new_stream(), b = new_stream();
  std::atomic<int> here{0};
  const auto meet = [&here] {
    ++here;
    while (here < 2) {
      std::this_thread::yield();
    }
  };
  on_stream(a, "meet", meet);
  on_stream(b, "meet", meet);
  CHECK(aclrtSynchronizeDevice() == ACL_SUCCESS);
  CHECK(here == 2);
  CHECK(aclrtDestroyStream(a) == ACL_SUCCESS);
  CHECK(aclrtDestroyStream(b) == ACL_SUCCESS);
}

void test_the_host_runs_ahead() {
  const aclrtStream stream = new_stream();
  std::atomic<bool> go{false};
  on_stream(stream, "gate", [&go] {
    while (!go) {
      std::this_thread::yield();
    }
  });
  aclrtStreamStatus status;
  CHECK(aclrtStreamQuery(stream, &status) == ACL_SUCCESS && status == ACL_STREAM_STATUS_NOT_READY);
  CHECK(aclrtSynchronizeStreamWithTimeout(stream, 10) == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
  CHECK(message_has("was not done after 10 ms"));
  CHECK(aclrtSynchronizeDeviceWithTimeout(10) == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
  go = true;
  CHECK(aclrtSynchronizeStreamWithTimeout(stream, 60000) == ACL_SUCCESS);
  CHECK(aclrtStreamQuery(stream, &status) == ACL_SUCCESS && status == ACL_STREAM_STATUS_COMPLETE);
  CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
}

// The default stream is the one of the calling thread's device; work runs with its stream's device chosen.
void test_devices() {
  int32_t ran_on[2] = {-1, -1};
  for (int device = 0; device < 2; ++device) {
    CHECK(aclrtSetDevice(device) == ACL_SUCCESS);
    on_stream(nullptr, "device", [&ran_on, device] { aclrtGetDevice(&ran_on[device]); });
    CHECK(aclrtSynchronizeDevice() == ACL_SUCCESS);
    CHECK(ran_on[device] == device);
  }
  const aclrtStream second = new_stream();
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
  std::atomic<bool> done{false};
  on_stream(second, "elsewhere", [&done] {
    nap(30);
    done = true;
  });
  CHECK(aclrtSynchronizeDevice() == ACL_SUCCESS);  // device 0 has nothing to do
  CHECK(!done);
  CHECK(aclrtDestroyStream(second) == ACL_SUCCESS);  // waits for queued work
  CHECK(done);
}

void test_destroyed() {
  const aclrtStream stream = new_stream();
  CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
  CHECK(aclrtDestroyStream(stream) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(aclrtSynchronizeStream(stream) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(message_has("is no stream, or was destroyed"));
  CHECK(aclrtDestroyStream(nullptr) == ACL_ERROR_RT_PARAM_INVALID);
}

// Many threads, each with its own streams and memory, on both devices.
void test_threads() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([t] {
      CHECK(aclrtSetDevice(t % 2) == ACL_SUCCESS);
      for (int round = 0; round < 30; ++round) {
        const aclrtStream stream = new_stream();
        int* device = device_memory<int>(1000);
        int* host = pinned_memory<int>(1000);
        CHECK(aclrtMemsetAsync(device, 4000, t + 1, 4000, stream) == ACL_SUCCESS);
        CHECK(aclrtMemcpyAsync(host, 4000, device, 4000, ACL_MEMCPY_DEVICE_TO_HOST, stream) == ACL_SUCCESS);
        CHECK(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
        CHECK(host[0] == (t + 1) * 0x01010101 && host[999] == host[0]);
        CHECK(aclrtFree(device) == ACL_SUCCESS);
        CHECK(aclrtFreeHost(host) == ACL_SUCCESS);
        CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// A process that ends with work queued does not hang.
void test_ends_with_work_queued() {
  const Ending ending = in_child([] {
    const aclrtStream stream = new_stream();
    on_stream(stream, "nap", [] { nap(1000000); });
    exit(0);
  });
  CHECK(ending.status == 0);
}

// A forked child has no threads, so its parent's streams are none of its own.
void test_fork() {
  const aclrtStream stream = new_stream();
  std::atomic<bool> go{false};
  on_stream(stream, "gate", [&go] {
    while (!go) {
      nap(1);
    }
  });
  const Ending ending = in_child([=] {
    CHECK(aclrtSynchronizeDevice() == ACL_SUCCESS);
    CHECK(aclrtSynchronizeStream(stream) == ACL_ERROR_RT_PARAM_INVALID);
    CHECK(aclFinalize() == ACL_SUCCESS);
    _exit(check_failures);
  });
  CHECK(ending.status == 0);
  go = true;
  CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
}

}  // namespace

int main() {
  start();
  test_ends_with_work_queued();  // first: a process with threads should not fork
  test_in_order();
  test_fork();
  test_side_by_side();
  test_the_host_runs_ahead();
  test_devices();
  test_destroyed();
  test_threads();
  return check_result();
}
