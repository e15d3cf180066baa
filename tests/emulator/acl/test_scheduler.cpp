// The modes of REC_SDK_EMULATED_STREAMS. Each case is a process of its own, since the setting is read once.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "support.h"

namespace {

using rec_sdk::emulator::on_stream;
using Log = std::vector<std::string>;

void in_order(const std::string& order, const std::function<void()>& work) {
  const Ending ending = in_child([&] {
    setenv("REC_SDK_EMULATED_STREAMS", order.c_str(), 1);
    start();
    work();
    _exit(check_failures == 0 ? 0 : 1);
  });
  CHECK(ending.status == 0);
  if (ending.status != 0) {
    std::fprintf(stderr, "with %s: %s\n", order.c_str(), ending.output.c_str());
  }
}

// Named streams whose tasks log that they ran.
class Streams {
 public:
  void task(char stream, const std::string& name) {
    on_stream(handle(stream), "task", [this, name] {
      const std::lock_guard<std::mutex> lock(mutex_);
      log_.push_back(name);
    });
  }

  aclrtEvent record(char stream) {
    const aclrtEvent event = new_event();
    CHECK(aclrtRecordEvent(event, handle(stream)) == ACL_SUCCESS);
    return event;
  }

  void wait(char stream, aclrtEvent event) {
    CHECK(aclrtStreamWaitEvent(handle(stream), event) == ACL_SUCCESS);
  }

  void synchronize(char stream) { CHECK(aclrtSynchronizeStream(handle(stream)) == ACL_SUCCESS); }

  aclrtStream handle(char stream) {
    aclrtStream& handle = handles_[stream - 'a'];
    if (handle == nullptr) {
      handle = new_stream();
    }
    return handle;
  }

  Log log() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return log_;
  }

 private:
  aclrtStream handles_[26] = {};
  std::mutex mutex_;
  Log log_;
};

bool done(aclrtEvent event) {
  aclrtEventRecordedStatus status;
  CHECK(aclrtQueryEventStatus(event, &status) == ACL_SUCCESS);
  return status == ACL_EVENT_RECORDED_STATUS_COMPLETE;
}

void test_late_runs_what_is_needed_when_it_is_needed() {
  Streams streams;
  streams.task('a', "a1");
  streams.task('b', "b1");
  const aclrtEvent b1 = streams.record('b');
  streams.task('b', "b2");
  streams.task('c', "c1");
  streams.task('a', "a2");
  streams.wait('a', b1);
  streams.task('a', "a3");
  const aclrtEvent a3 = streams.record('a');
  streams.task('a', "a4");
  CHECK(streams.log().empty());
  CHECK(aclrtSynchronizeEvent(a3) == ACL_SUCCESS);
  CHECK((streams.log() == Log{"a1", "a2", "b1", "a3"}));
  streams.synchronize('b');
  CHECK((streams.log() == Log{"a1", "a2", "b1", "a3", "b2"}));
  CHECK(aclrtSynchronizeDevice() == ACL_SUCCESS);
  CHECK((streams.log() == Log{"a1", "a2", "b1", "a3", "b2", "a4", "c1"}));  // the youngest first
}

void test_late_waits_through_streams() {
  Streams streams;
  for (char stream = 'a'; stream < 'h'; ++stream) {
    if (stream > 'a') {
      streams.wait(stream, streams.record(static_cast<char>(stream - 1)));
    }
    streams.task(stream, std::string(1, stream));
  }
  streams.synchronize('g');
  CHECK((streams.log() == Log{"a", "b", "c", "d", "e", "f", "g"}));
}

void test_late_runs_at_the_end() {
  for (const bool destroy : {true, false}) {
    Streams streams;
    streams.task('a', "a1");
    CHECK((destroy ? aclrtDestroyStream(streams.handle('a')) : aclrtResetDevice(0)) == ACL_SUCCESS);
    CHECK(streams.log().size() == 1);
  }
  Streams streams;
  streams.task('a', "a1");
  CHECK(aclFinalize() == ACL_SUCCESS);
  CHECK(streams.log().size() == 1);
}

// Each query advances the queried work by one task, and nothing else.
void test_late_asking_makes_progress() {
  Streams streams;
  streams.task('b', "b1");
  const aclrtEvent b1 = streams.record('b');
  streams.task('a', "a1");
  streams.wait('a', b1);
  streams.task('a', "a2");
  const aclrtEvent a2 = streams.record('a');
  streams.task('c', "c1");
  size_t asked = 0, ran = 0;
  while (!done(a2)) {
    ++asked;
    CHECK(streams.log().size() <= ran + 1);
    ran = streams.log().size();
  }
  CHECK(asked == 6);  // three tasks, a wait, two records
  CHECK((streams.log() == Log{"a1", "b1", "a2"}));
  aclrtStreamStatus status = ACL_STREAM_STATUS_NOT_READY;
  for (asked = 0; status != ACL_STREAM_STATUS_COMPLETE; ++asked) {
    CHECK(aclrtStreamQuery(streams.handle('c'), &status) == ACL_SUCCESS);
  }
  CHECK(asked == 2);
}

// A stream's queue is bounded, even if nothing waits.
void test_late_queues_end() {
  Streams streams;
  for (int i = 0; i < 1500; ++i) {
    streams.task('a', "");
  }
  CHECK(streams.log().size() == 1500 - 1024);
  streams.synchronize('a');
  CHECK(streams.log().size() == 1500);
}

void test_late_copies() {
  Streams streams;
  char* device = device_memory(100);
  char* pinned = pinned_memory(100);
  std::memset(pinned, 'p', 100);
  const aclrtStream a = streams.handle('a'), b = streams.handle('b');
  CHECK(aclrtMemcpyAsync(device, 100, pinned, 100, ACL_MEMCPY_HOST_TO_DEVICE, a) == ACL_SUCCESS);
  std::memset(pinned, 'q', 100);  // too soon
  std::vector<char> pageable(100, 'x');
  char* other = device_memory(100);
  CHECK(aclrtMemcpyAsync(other, 100, pageable.data(), 100, ACL_MEMCPY_HOST_TO_DEVICE, b) == ACL_SUCCESS);
  std::fill(pageable.begin(), pageable.end(), 'y');
  CHECK(aclrtMemcpyAsync(pageable.data(), 100, other, 100, ACL_MEMCPY_DEVICE_TO_HOST, b) == ACL_SUCCESS);
  CHECK(pageable[0] == 'x');
  streams.synchronize('a');
  CHECK(to_host(device, 100)[99] == 'q');
}

// Deadlocks: the host waits for nothing that the runtime knows of, or for work that waits for other work.
void test_all_goes_on_by_itself() {
  Streams streams;
  std::atomic<int> here{0};
  on_stream(streams.handle('a'), "first", [] {});
  CHECK(aclrtLaunchHostFunc(
            streams.handle('a'), [](void* here) { ++*static_cast<std::atomic<int>*>(here); }, &here) ==
        ACL_SUCCESS);
  while (here == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const auto meet = [&here] {
    ++here;
    while (here < 3) {
      std::this_thread::yield();
    }
  };
  for (const bool waits : {true, false}) {
    here = 1;
    on_stream(streams.handle('b'), "meet", meet, waits);
    on_stream(streams.handle('c'), "meet", meet, waits);
    streams.synchronize('b');
    streams.synchronize('c');
  }
}

// A query does not wait for work that waits for the host.
void test_asking_does_not_wait() {
  Streams streams;
  std::atomic<bool> go{false};
  CHECK(aclrtLaunchHostFunc(
            streams.handle('a'),
            [](void* go) {
              while (!*static_cast<std::atomic<bool>*>(go)) {
                std::this_thread::yield();
              }
            },
            &go) == ACL_SUCCESS);
  streams.task('a', "a1");
  const aclrtEvent a1 = streams.record('a');
  for (int i = 0; i < 100; ++i) {
    CHECK(!done(a1));
  }
  CHECK(aclrtSynchronizeEventWithTimeout(a1, 20) == ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
  go = true;
  while (!done(a1)) {
  }
  CHECK(streams.log().size() == 1);
}

// Runs three streams with some events, and returns the order of tasks as one line.
std::string course() {
  Streams streams;
  for (int i = 0; i < 40; ++i) {
    const char stream = static_cast<char>('a' + i % 3);
    if (i % 7 == 3) {
      streams.wait(stream, streams.record(static_cast<char>('a' + (i + 1) % 3)));
    }
    streams.task(stream, std::string(1, stream));
  }
  streams.synchronize('b');
  CHECK(aclrtSynchronizeDevice() == ACL_SUCCESS);
  std::string line;
  for (const std::string& entry : streams.log()) {
    line += entry;
  }
  return line;
}

std::string course_in(const std::string& order) {
  return in_child([&] {
           setenv("REC_SDK_EMULATED_STREAMS", order.c_str(), 1);
           start();
           std::fprintf(stderr, "%s", course().c_str());
         })
      .output;
}

void test_a_seed_is_an_order() {
  const std::string first = course_in("random:1");
  CHECK(first.size() == 40);
  CHECK(course_in("random:1") == first);
  CHECK(course_in("random:2") != first);
  CHECK(course_in("late") != first);
  CHECK(course_in("late") == course_in("late"));
}

// Without an event, either may be first; with one, never the second.
void test_random_orders() {
  Streams streams;
  size_t swapped = 0;
  constexpr size_t kRounds = 200;
  for (size_t round = 0; round < kRounds; ++round) {
    for (const bool event : {true, false}) {
      streams.task('a', "first");
      if (event) {
        streams.wait('b', streams.record('a'));
      }
      streams.task('b', "second");
      CHECK(aclrtSynchronizeDevice() == ACL_SUCCESS);
      const Log log = streams.log();
      const bool wrong = log.back() == "first";
      CHECK(!event || !wrong);
      swapped += wrong ? 1 : 0;
    }
  }
  CHECK(swapped > kRounds / 10 && swapped < kRounds);
}

void test_eager_needs_nobody() {
  Streams streams;
  streams.task('a', "a1");
  while (streams.log().empty()) {
    std::this_thread::yield();
  }
}

}  // namespace

int main() {
  in_order("late", test_late_runs_what_is_needed_when_it_is_needed);
  in_order("late", test_late_waits_through_streams);
  in_order("late", test_late_runs_at_the_end);
  in_order("late", test_late_asking_makes_progress);
  in_order("late", test_late_queues_end);
  in_order("late", test_late_copies);
  for (const char* order : {"eager", "late", "random:1"}) {
    in_order(order, test_all_goes_on_by_itself);
    in_order(order, test_asking_does_not_wait);
  }
  in_order("random:1", test_random_orders);
  in_order("random:2", test_random_orders);
  test_a_seed_is_an_order();
  in_order("eager", test_eager_needs_nobody);
  return check_result();
}
