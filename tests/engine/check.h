// The whole test framework: CHECK reports the line and goes on; a test's main returns check_result().
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

// Whether repetition runs too: more rounds, every combination. `make test-full` sets the variable.
inline bool full_tests() {
  static const bool full = std::getenv("REC_SDK_TESTS_FULL") != nullptr;
  return full;
}

// Deals out combinations of a product: every `share`-th in turn, or all in full tests. If `share` and the
// number of combinations have no common divisor, further calls with the same product deal out the others. The
// first one depends on the day, so that a week of runs covers more than one run.
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

// Tests register themselves; tests/engine/main.cpp runs the tests of a program in order. A threaded test
// runs again on eight threads, however small its batches are.
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
