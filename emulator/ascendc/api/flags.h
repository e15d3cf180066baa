// Synchronization between the engines of a core.
#pragma once

#include "emulator/ascendc/api/language.h"
#include "emulator/ascendc/engine/instructions.h"
#include "emulator/ascendc/engine/names.h"

namespace AscendC {

// The types of flags of a vector core. Each is named after the engine that sets it and the engine that waits
// for it.
enum class HardEvent : uint8_t {
  MTE2_V,
  V_MTE2,
  MTE3_V,
  V_MTE3,
  V_V,
  MTE3_MTE2,
  MTE2_MTE3,
  S_V,
  V_S,
  S_MTE2,
  MTE2_S,
  S_MTE3,
  MTE3_S,
  MAX,
};
static_assert(static_cast<int>(HardEvent::MAX) == rec_sdk::emulator::kEventTypes,
              "kEvents has the same order");

constexpr int event_of(HardEvent event) { return static_cast<int>(event); }

template <HardEvent event>
void SetFlag(int32_t eventID) {
  rec_sdk::emulator::set_flag(event_of(event), eventID);
}

template <HardEvent event>
void WaitFlag(int32_t eventID) {
  rec_sdk::emulator::wait_flag(event_of(event), eventID);
}

template <pipe_t pipe>
void PipeBarrier() {
  using namespace rec_sdk::emulator;
  static_assert(pipe != PIPE_S, "PipeBarrier: PIPE_S is always in order and has no barrier");
  static_assert(pipe == PIPE_V || pipe == PIPE_MTE2 || pipe == PIPE_MTE3 || pipe == PIPE_ALL,
                "PipeBarrier: a vector core has PIPE_V, PIPE_MTE2, PIPE_MTE3 and PIPE_ALL");
  if constexpr (pipe == PIPE_ALL) {
    barrier_all();
  } else {
    barrier(pipe == PIPE_V ? kVector : pipe == PIPE_MTE2 ? kMte2 : kMte3);
  }
}

}  // namespace AscendC
