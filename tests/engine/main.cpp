// Runs the tests of a program, which tests/engine/check.h registers.
#include "tests/engine/check.h"
#include "tests/engine/threads.h"

int main() {
  bool any_threaded = false;
  for (const RegisteredTest& test : registered_tests) {
    any_threaded |= test.threaded;
#ifdef __SANITIZE_THREAD__  // a run on one thread has no data races
    if (test.threaded) continue;
#endif
    test.run();
  }
  rec_sdk::set_parallel_runner(rec_sdk::run_on_threads, rec_sdk::eight_threads, 0);
  for (const RegisteredTest& test : registered_tests) {
    if (test.threaded) test.run();
  }
  rec_sdk::set_parallel_runner(nullptr, nullptr);
  CHECK(!any_threaded || rec_sdk::pieces_run > 1000);
  return check_result();
}
