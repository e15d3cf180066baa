// A launch that fails puts its device into error, and only that one, until it is reset.
#include <acl/acl_op_compiler.h>

#include <stdexcept>
#include <thread>

#include "support.h"

using rec_sdk::emulator::on_stream;

namespace {

void fail_a_launch(aclrtStream stream) {
  on_stream(stream, "bad_kernel", [] { throw std::runtime_error("core 3, MTE2: not aligned"); });
}

void test_failing_launch() {
  const aclrtStream stream = new_stream();
  const aclrtEvent event = new_event();
  char* memory = device_memory(100);
  bool ran = false, destroyed = false;
  struct Later {
    bool *ran, *destroyed;
    static const char* run(void* self) {
      *static_cast<Later*>(self)->ran = true;
      return nullptr;
    }
    static void destroy(void* self) { *static_cast<Later*>(self)->destroyed = true; }
  } later{&ran, &destroyed};

  on_stream(stream, "gate", [] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); });
  fail_a_launch(stream);
  rec_sdk_emulator_launch(stream, "later", &Later::run, &Later::destroy, &later, false);
  CHECK(aclrtRecordEvent(event, stream) == ACL_SUCCESS);

  const aclError bad = ACL_ERROR_RT_VECTOR_CORE_EXCEPTION;
  CHECK(aclrtSynchronizeStream(stream) == bad);
  CHECK(message_has("bad_kernel: core 3, MTE2: not aligned"));
  CHECK(!ran && destroyed);
  CHECK(aclrtSynchronizeEvent(event) ==
        bad);  // the event is reached, so that no thread hangs, and returns the error
  aclrtEventRecordedStatus status;
  CHECK(aclrtQueryEventStatus(event, &status) == bad && status == ACL_EVENT_RECORDED_STATUS_COMPLETE);
  void* more = nullptr;
  CHECK(aclrtMalloc(&more, 100, ACL_MEM_MALLOC_HUGE_FIRST) == bad);
  char host[100];
  CHECK(aclrtMemcpy(host, 100, memory, 100, ACL_MEMCPY_DEVICE_TO_HOST) == bad);
  CHECK(aclrtMemsetAsync(memory, 100, 0, 100, stream) == bad);
  CHECK(aclrtRecordEvent(event, stream) == bad);
  CHECK(aclrtSynchronizeDevice() == bad);
  CHECK(message_has("device 0, stream "));
  CHECK(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL) == bad);
  CHECK(aclrtGetLastError(ACL_RT_THREAD_LEVEL) == bad);
  CHECK(aclrtGetLastError(ACL_RT_THREAD_LEVEL) == ACL_SUCCESS);
  // Threads other than the one that made the failing call get the error too.
  std::thread([] {
    CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
    CHECK(message_has("bad_kernel: core 3"));
  }).join();
  // Launches are dropped, and the objects they own are destroyed.
  ran = destroyed = false;
  rec_sdk_emulator_launch(stream, "later", &Later::run, &Later::destroy, &later, false);
  CHECK(!ran && destroyed);

  CHECK(aclrtSetDevice(1) == ACL_SUCCESS);
  CHECK(aclrtFree(device_memory(100)) == ACL_SUCCESS);
  CHECK(aclrtSynchronizeDevice() == ACL_SUCCESS);
  CHECK(std::string(aclGetRecentErrMsg()).empty());
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);

  CHECK(aclrtFree(memory) == ACL_SUCCESS);  // so that a framework can clean up
  CHECK(aclrtResetDevice(0) == ACL_SUCCESS);
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
  CHECK(aclrtSynchronizeDevice() == ACL_SUCCESS);
  CHECK(aclrtFree(device_memory(100)) == ACL_SUCCESS);
  CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
}

// A stream of a healthy device that waits for a stream of a failed device continues.
void test_waiting_for_a_failed_device() {
  const aclrtStream stream = new_stream();
  const aclrtEvent event = new_event();
  CHECK(aclrtSetDevice(1) == ACL_SUCCESS);
  on_stream(nullptr, "gate", [] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); });
  fail_a_launch(nullptr);
  CHECK(aclrtRecordEvent(event, nullptr) == ACL_SUCCESS);
  CHECK(aclrtStreamWaitEvent(stream, event) == ACL_SUCCESS);
  CHECK(aclrtSynchronizeStream(stream) == ACL_SUCCESS);
  CHECK(aclrtResetDevice(1) == ACL_SUCCESS);
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
  CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
}

void test_messages() {
  CHECK(aclrtFree(nullptr) == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(message_has("aclrtFree: the address is null"));
  CHECK(std::string(aclGetRecentErrMsg()).empty());  // returned once
}

// A launch that cannot be queued returns an error.
void test_launch_on_a_destroyed_stream() {
  const aclrtStream stream = new_stream();
  CHECK(aclrtDestroyStream(stream) == ACL_SUCCESS);
  on_stream(stream, "kernel", [] {});
  CHECK(aclrtSynchronizeDevice() == ACL_ERROR_RT_PARAM_INVALID);
  CHECK(message_has("is no stream, or was destroyed"));
  CHECK(aclrtResetDevice(0) == ACL_SUCCESS);
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
}

void test_graph_operators_fail_loudly() {
  CHECK(aclopCompileAndExecute("TopKV2", 0, nullptr, nullptr, 0, nullptr, nullptr, nullptr, ACL_ENGINE_SYS,
                               ACL_COMPILE_SYS, nullptr, nullptr) != ACL_SUCCESS);
  CHECK(message_has("operator TopKV2"));
  CHECK(aclrtSynchronizeDevice() != ACL_SUCCESS);
  CHECK(message_has("operator TopKV2"));
  CHECK(aclrtResetDevice(0) == ACL_SUCCESS);
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
}

void test_initialized_once() {
  CHECK(aclInit(nullptr) == ACL_ERROR_REPEAT_INITIALIZE);
  CHECK(aclFinalize() == ACL_SUCCESS);
  CHECK(aclFinalize() == ACL_ERROR_UNINITIALIZE);
  CHECK(aclInit(nullptr) == ACL_SUCCESS);
}

}  // namespace

int main() {
  start();
  test_failing_launch();
  test_waiting_for_a_failed_device();
  test_messages();
  test_launch_on_a_destroyed_stream();
  test_graph_operators_fail_loudly();
  test_initialized_once();
  return check_result();
}
