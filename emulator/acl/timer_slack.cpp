#include "timer_slack.h"

#include <sys/prctl.h>

namespace rec_sdk::emulator {
namespace {

constexpr unsigned long kCoarseSlack = 1'000'000;  // nanoseconds

thread_local unsigned long before = 0;  // the thread's former slack while it is changed; otherwise 0

}  // namespace

void start_drowsy_threads() {
  if (before == 0) {
    const int slack = prctl(PR_GET_TIMERSLACK);
    if (slack > 0 && prctl(PR_SET_TIMERSLACK, kCoarseSlack) == 0) {
      before = static_cast<unsigned long>(slack);
    }
  }
}

void start_alert_threads() {
  if (before != 0) {
    prctl(PR_SET_TIMERSLACK, before);
    before = 0;
  }
}

}  // namespace rec_sdk::emulator
