#include "guard.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "addresses.h"

namespace rec_sdk::emulator {
namespace {

// The previous handlers form a stack: another handler, such as Python's faulthandler, may be installed over
// this one, and then this one is installed over the other again.
constexpr int kMostInstalls = 8;
struct sigaction previous[kMostInstalls];
std::atomic<int> installs{0};

// A line of text. It uses only functions that a signal handler may call.
class Line {
 public:
  Line& add(const char* part) {
    while (*part != '\0' && length_ < sizeof text_) {
      text_[length_++] = *part++;
    }
    return *this;
  }

  Line& add(uint64_t number, unsigned base) {
    char digits[24];
    char* first = digits + sizeof digits - 1;
    *first = '\0';
    do {
      *--first = "0123456789abcdef"[number % base];
      number /= base;
    } while (number != 0);
    return add(first);
  }

  void print() const {
    const ssize_t written = write(STDERR_FILENO, text_, length_);
    static_cast<void>(written);  // a failed write cannot be reported
  }

 private:
  char text_[256];
  size_t length_ = 0;
};

void explain(int signal, siginfo_t* info, void*) {
  const AddressRange range = info->si_code > 0 ? range_of(info->si_addr) : AddressRange{};
  if (range.device >= 0) {
    Line()
        .add("NPU emulator: host code touched device memory, address 0x")
        .add(reinterpret_cast<uintptr_t>(info->si_addr), 16)
        .add(" of device ")
        .add(static_cast<uint64_t>(range.device), 10)
        .add("; copy it to the host first\n")
        .print();
  }
  // Restores the previous handler. It gets the fault too, because the instruction faults again when this
  // handler returns.
  sigaction(signal, &previous[--installs], nullptr);
  if (info->si_code <= 0) {
    raise(signal);  // a signal that a process sent does not occur again by itself
  }
}

}  // namespace

void install_guard() {
  struct sigaction action;
  sigaction(SIGSEGV, nullptr, &action);
  const bool on_top = (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == explain;
  if (on_top || installs == kMostInstalls) {
    return;
  }
  std::memset(&action, 0, sizeof action);
  action.sa_sigaction = explain;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous[installs++]);
}

}  // namespace rec_sdk::emulator
