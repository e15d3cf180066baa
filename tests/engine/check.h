// The test framework of the engine's C++ tests. A failed CHECK reports its line and lets the test continue;
// main() returns check_result().
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

// Returns whether tests must run all rounds and combinations. `make test-full` sets the variable for this.
inline bool full_tests() {
  static const bool full = std::getenv("REC_SDK_TESTS_FULL") != nullptr;
  return full;
}

// Selects every `share`-th of the combinations that a test iterates over, or all of them in full tests. If
// `share` and the number of combinations have no common divisor, later loops over the same combinations
// select other ones. The first selected combination depends on the day, so the runs of a week cover more
// combinations than one run.
class Deal {
 public:
  explicit Deal(int share) : share_(share) {
    const char* const day = std::getenv("REC_SDK_TESTS_DAY");
    count_ = day == nullptr ? 0 : std::atoi(day);
  }
  bool next() { return full_tests() || count_++ % share_ == 0; }

 private:
  int share_, count_;
};

inline int check_failures = 0;

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) {                                                      \
      if (++check_failures <= 20) {                                          \
        std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      }                                                                      \
    }                                                                        \
  } while (false)

#define CHECK_THROWS(expression, Exception) \
  do {                                      \
    bool thrown = false;                    \
    try {                                   \
      (void)(expression);                   \
    } catch (const Exception&) {            \
      thrown = true;                        \
    }                                       \
    CHECK(thrown && #Exception);            \
  } while (false)

// A registered test. TEST and THREADED_TEST register tests, and main.cpp runs the tests of a program in
// order. A threaded test runs a second time on eight threads, which are then used even for small batches.
struct RegisteredTest {
  void (*run)();
  bool threaded;
};
inline std::vector<RegisteredTest> registered_tests;
inline bool register_test(void (*run)(), bool threaded) {
  registered_tests.push_back({run, threaded});
  return true;
}
#define REGISTERED_TEST(name, threaded)                                              \
  void name();                                                                       \
  [[maybe_unused]] const bool name##_is_registered = register_test(&name, threaded); \
  void name()
#define TEST(name) REGISTERED_TEST(name, false)
#define THREADED_TEST(name) REGISTERED_TEST(name, true)

inline int check_result() {
  std::printf("%d failed checks\n", check_failures);
  return check_failures == 0 ? 0 : 1;
}
