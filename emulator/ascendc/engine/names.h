// The engines of a core, and their names in messages.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

// The engines: the scalar unit, the vector unit, copies into the unified buffer (UB), and copies out of it.
enum Engine : int32_t { kScalar = 0, kVector = 1, kMte2 = 2, kMte3 = 3 };
constexpr int kEngines = 4;

inline const char* engine_name(int engine) {
  constexpr const char* kNames[kEngines] = {"S", "V", "MTE2", "MTE3"};
  return kNames[engine];
}

// The pairs of engines that have flags on a vector core, in the order of HardEventAiv.
constexpr int kEventTypes = 13;
constexpr int kEventIds = 8;

struct EventType {
  const char* name;
  Engine from, to;
};

constexpr EventType kEvents[kEventTypes] = {
    {"MTE2_V", kMte2, kVector},  {"V_MTE2", kVector, kMte2}, {"MTE3_V", kMte3, kVector},
    {"V_MTE3", kVector, kMte3},  {"V_V", kVector, kVector},  {"MTE3_MTE2", kMte3, kMte2},
    {"MTE2_MTE3", kMte2, kMte3}, {"S_V", kScalar, kVector},  {"V_S", kVector, kScalar},
    {"S_MTE2", kScalar, kMte2},  {"MTE2_S", kMte2, kScalar}, {"S_MTE3", kScalar, kMte3},
    {"MTE3_S", kMte3, kScalar},
};

constexpr int event_index(Engine from, Engine to) {
  for (int i = 0; i < kEventTypes; ++i) {
    if (kEvents[i].from == from && kEvents[i].to == to) {
      return i;
    }
  }
  return -1;
}

}  // namespace rec_sdk::emulator
