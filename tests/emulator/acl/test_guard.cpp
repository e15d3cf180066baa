// Host code that accesses device memory always faults, with a message.
#include <fcntl.h>
#include <signal.h>

#include <thread>

#include "support.h"

namespace {

void check_faults(const std::function<void()>& touch, const char* device) {
  const Ending ending = in_child(touch);
  CHECK(kSanitized ? ending.status != 0 : WIFSIGNALED(ending.status) && WTERMSIG(ending.status) == SIGSEGV);
  CHECK(contains(ending.output, "host code touched device memory"));
  CHECK(contains(ending.output, device));
  CHECK(contains(ending.output, "copy it to the host first"));
}

void test_touching() {
  volatile char* memory = device_memory(1000);
  check_faults([=] { static_cast<void>(memory[0]); }, "of device 0");
  check_faults([=] { memory[999] = 1; }, "of device 0");
  CHECK(aclrtSetDevice(1) == ACL_SUCCESS);
  volatile char* other = device_memory(1000);
  check_faults([=] { other[5] = 1; }, "of device 1");
  CHECK(aclrtSetDevice(0) == ACL_SUCCESS);
  // Freed memory, and memory that was never allocated, faults too.
  CHECK(aclrtFree(const_cast<char*>(memory)) == ACL_SUCCESS);
  check_faults([=] { memory[0] = 1; }, "of device 0");
  check_faults([=] { memory[1 << 20] = 1; }, "of device 0");
}

// While kernels and copies run on the memory, too.
void test_touching_during_work() {
  char* memory = device_memory(1000);
  check_faults(
      [=] {
        const aclrtStream stream = new_stream();
        auto* inside = static_cast<char*>(rec_sdk_emulator_host_address(memory, 1000));
        rec_sdk::emulator::on_stream(stream, "kernel", [=] {
          for (int i = 0; i < 1000; ++i) {
            inside[i] = 1;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        });
        while (*const_cast<volatile char*>(inside) != 1) {
        }
        static_cast<void>(*const_cast<volatile char*>(memory));
      },
      "of device 0");
}

// A kernel that is passed a device address in place of the host's view of it.
void test_touching_from_a_stream() {
  volatile char* memory = device_memory(1000);
  check_faults(
      [=] {
        rec_sdk::emulator::on_stream(nullptr, "kernel", [=] { memory[0] = 1; });
        aclrtSynchronizeDevice();
      },
      "of device 0");
}

// System calls return an error for the address, and no data.
void test_system_calls() {
  char* memory = device_memory(1000);
  const int file = open("/dev/zero", O_RDONLY);
  CHECK(read(file, memory, 10) == -1 && errno == EFAULT);
  close(file);
}

// Other faults go to the handler that was installed before.
void test_other_faults() {
  const Ending plain = in_child([] { raise(SIGSEGV); });
  CHECK(kSanitized || (WIFSIGNALED(plain.status) && WTERMSIG(plain.status) == SIGSEGV));
  CHECK(plain.output.find("device memory") == std::string::npos);
  const Ending null = in_child([] {
    volatile char* nowhere = nullptr;
    static_cast<void>(nowhere[8]);
  });
  CHECK(null.status != 0);
  CHECK(null.output.find("device memory") == std::string::npos);
}

void earlier_handler(int) {
  static const char kText[] = "earlier handler\n";
  const ssize_t written = write(STDERR_FILENO, kText, sizeof kText - 1);
  _exit(written > 0 ? 5 : 6);
}

// The handler that was installed before the runtime started runs after the message.
void test_earlier_handler() {
  signal(SIGSEGV, earlier_handler);
  const Ending ending = in_child([] {
    start();
    volatile char* memory = device_memory(10);
    memory[0] = 1;
  });
  CHECK(WIFEXITED(ending.status) && WEXITSTATUS(ending.status) == 5);
  CHECK(contains(ending.output, "host code touched device memory"));
  CHECK(contains(ending.output, "earlier handler"));
  signal(SIGSEGV, SIG_DFL);
}

struct sigaction below_later;

// Like Python's faulthandler: the earlier handler is restored and gets the signal again.
void later_handler(int signal) {
  static const char kText[] = "later handler\n";
  const ssize_t written = write(STDERR_FILENO, kText, sizeof kText - 1);
  sigaction(signal, &below_later, nullptr);
  raise(written > 0 ? signal : SIGABRT);
}

void test_later_handler() {
  const Ending ending = in_child([] {
    struct sigaction action = {};
    action.sa_handler = later_handler;
    action.sa_flags = SA_NODEFER;
    sigaction(SIGSEGV, &action, &below_later);
    aclrtSetDevice(1);
    volatile char* memory = device_memory(10);
    memory[0] = 1;
  });
  CHECK(WIFSIGNALED(ending.status) && WTERMSIG(ending.status) == SIGSEGV);
  CHECK(contains(ending.output, "host code touched device memory"));
  CHECK(contains(ending.output, "later handler"));
}

}  // namespace

int main() {
  test_earlier_handler();
  start();
  test_touching();
  test_touching_during_work();
  test_touching_from_a_stream();
  test_system_calls();
  test_other_faults();
  if (!kSanitized) {
    test_later_handler();
  }
  return check_result();
}
