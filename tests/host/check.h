// The whole test framework: CHECK reports the line and goes on; a test's main returns check_result().
#pragma once

#include <cstdio>

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

inline int check_result() {
  std::printf("%d failed checks\n", check_failures);
  return check_failures == 0 ? 0 : 1;
}
