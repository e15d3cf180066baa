// Events order streams and measure time.
#include <atomic>
#include <chrono>
#include <thread>

#include "support.h"

using rec_sdk::emulator::on_stream;

namespace {

void nap(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// A chain of copies over two streams of two devices: each link waits for the one before.
void test_across_streams() {
  constexpr int kRounds = 100;
  CHECK(aclrtSetDevice(1) == ACL_SUCCESS);
  const aclrtStream second = new_stream();
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
  const aclrtStream first = new_stream();
  const aclrtEvent to_second = new_event(), to_first = new_event();
  int counter = 0;  // no lock, no atomic: the events order it
  bool ordered = true;
  for (int round = 0; round < kRounds; ++round) {
    const auto step = [&counter, &ordered](int expected) {
      return [&counter, &ordered, expected] {
        ordered = ordered && counter == expected;
        ++counter;
      };
    };
    on_stream(first, "first", step(2 * round));
    CHECK(aclrtRecordEvent(to_second, first) == ACL_SUCCESS);
    CHECK(aclrtStreamWaitEvent(second, to_second) == ACL_SUCCESS);
    on_stream(second, "second", step(2 * round + 1));
    CHECK(aclrtRecordEvent(to_first, second) == ACL_SUCCESS);
    CHECK(aclrtStreamWaitEvent(first, to_first) == ACL_SUCCESS);
  }
  CHECK(aclrtSynchronizeStream(first) == ACL_SUCCESS);
  CHECK(counter == 2 * kRounds && ordered);
  CHECK(aclrtDestroyEvent(to_first) == ACL_SUCCESS);
  CHECK(aclrtDestroyEvent(to_second) == ACL_SUCCESS);
  CHECK(aclrtDestroyStream(first) == ACL_SUCCESS);
  CHECK(aclrtDestroyStream(second) == ACL_SUCCESS);
}

void test_query_and_synchronize() {
  const aclrtStream stream = new_stream();
  const aclrtEvent event = new_event();
  aclrtEventRecordedStatus status;
  aclrtEventWaitStatus wait_status;
  CHECK(aclrtQueryEventStatus(event, &status) == ACL_SUCCESS && status == ACL_EVENT_RECORDED_STATUS_COMPLETE);
  CHECK(aclrtSynchronizeEvent(event) == ACL_SUCCESS);  // nothing recorded, nothing to wait for
  std::atomic<bool> go{false};
  on_stream(stream, "gate", [&go] {
    while (!go) {
      std::this_thread::yield();
    }
  });
  CHECK(aclrtRecordEvent(event, stream) == ACL_SUCCESS);
  CHECK(aclrtQueryEventStatus(event, &status) == ACL_SUCCESS &&
        status == ACL_EVENT_RECORDED_STATUS_NOT_READY);
  CHECK(aclrtQueryEventWaitStatus(event, &wait_status) == ACL_SUCCESS);
  CHECK(wait_status == ACL_EVENT_WAIT_STATUS_NOT_READY);
  CHECK(aclrtSynchronizeEventWithTimeout(event, 10) == ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
  CHECK(message_has("not reached after 10 ms"));
  go = true;
  CHECK(aclrtSynchronizeEvent(event) == ACL_SUCCESS);
  CHECK(aclrtQueryEventStatus(event, &status) == ACL_SUCCESS && status == ACL_EVENT_RECORDED_STATUS_COMPLETE);
  // An event destroyed while it is queued is still reached by streams that wait for it.
  on_stream(stream, "nap", [] { nap(30); });
  CHECK(aclrtRecordEvent(event, stream) == ACL_SUCCESS);
  CHECK(aclrtStreamWaitEvent(nullptr, event) == ACL_SUCCESS);
  CHECK(aclrtDestroyEvent(event) == ACL_SUCCESS);
  CHECK(aclrtSynchronizeDevice() == ACL_SUCCESS);
  CHECK(aclrtRecordEvent(event, stream) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(message_has("is no event, or was destroyed"));
  CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
}

void test_time() {
  const aclrtStream stream = new_stream();
  const aclrtEvent start = new_event(), end = new_event();
  float milliseconds = -1;
  CHECK(aclrtEventElapsedTime(&milliseconds, start, end) == ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
  CHECK(aclrtRecordEvent(start, stream) == ACL_SUCCESS);
  on_stream(stream, "nap", [] { nap(30); });
  CHECK(aclrtRecordEvent(end, stream) == ACL_SUCCESS);
  CHECK(aclrtSynchronizeEvent(end) == ACL_SUCCESS);
  CHECK(aclrtEventElapsedTime(&milliseconds, start, end) == ACL_SUCCESS);
  CHECK(milliseconds >= 30 && milliseconds < 10000);
  uint64_t from = 0, to = 0;
  CHECK(aclrtEventGetTimestamp(start, &from) == ACL_SUCCESS);
  CHECK(aclrtEventGetTimestamp(end, &to) == ACL_SUCCESS);
  CHECK(to - from >= 30000);
  aclrtEvent untimed = nullptr;
  CHECK(aclrtCreateEventExWithFlag(&untimed, ACL_EVENT_SYNC) == ACL_SUCCESS);
  CHECK(aclrtRecordEvent(untimed, stream) == ACL_SUCCESS);
  CHECK(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  CHECK(aclrtEventElapsedTime(&milliseconds, start, untimed) == ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
  CHECK(message_has("ACL_EVENT_TIME_LINE"));
  CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
}

}  // namespace

int main() {
  start();
  test_across_streams();
  test_query_and_synchronize();
  test_time();
  return check_result();
}
