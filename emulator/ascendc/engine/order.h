// The order of instructions within one core, as far as it is guaranteed.
//
// All cores of a thread share one clock, which counts instructions. Each engine has a limit for each engine:
// the stamp of the other engine's latest instruction that is certainly complete before the engine's next
// instruction starts. Flags and barriers raise limits. Two accesses to the same bytes are ordered if the
// stamp of the earlier access is within the limit that the engine of the later access has for its engine.
#pragma once

#include <cstdint>

#include "emulator/ascendc/engine/names.h"

namespace rec_sdk::emulator {

// A stamp of an instruction, which combines its time and its engine: time * 4 + engine.
using Stamp = int32_t;

constexpr Stamp stamp_of(int32_t time, int engine) { return time << 2 | engine; }
constexpr int stamp_engine(Stamp stamp) { return stamp & 3; }
constexpr int32_t stamp_time(Stamp stamp) { return stamp >> 2; }
// Returns the largest stamp with that time.
constexpr Stamp limit_of(int32_t time) { return time << 2 | 3; }

struct Limits {
  Stamp by_engine[kEngines];

  bool covers(Stamp stamp) const { return stamp <= by_engine[stamp_engine(stamp)]; }
  // Returns whether all stamps in `stamps`, one for each engine, are within the limits.
  bool cover(const Limits& stamps) const {
    Stamp left = 0;  // becomes negative if a stamp exceeds its limit, because stamps are not negative
    for (int i = 0; i < kEngines; ++i) {
      left |= by_engine[i] - stamps.by_engine[i];
    }
    return left >= 0;
  }
  void raise(const Limits& other) {
    for (int i = 0; i < kEngines; ++i) {
      by_engine[i] = by_engine[i] > other.by_engine[i] ? by_engine[i] : other.by_engine[i];
    }
  }
};

class Order {
 public:
  // Marks all instructions up to `time` as complete, at the start of a core or at a barrier of all engines.
  void complete_all(int32_t time) {
    for (Limits& limits : limits_) {
      for (Stamp& limit : limits.by_engine) {
        limit = limit_of(time);
      }
    }
    // The scalar unit executes its instructions in order.
    limits_[kScalar].by_engine[kScalar] = INT32_MAX;
  }
  void barrier(int engine, int32_t time) { limits_[engine].by_engine[engine] = limit_of(time); }
  const Limits& limits(int engine) const { return limits_[engine]; }

  // Returns the limits that are valid once all instructions that were issued to `engine` so far are complete.
  Limits after(int engine, int32_t time) const {
    Limits known = limits_[engine];
    known.by_engine[engine] = limit_of(time);
    return known;
  }
  void wait(int engine, const Limits& known) {
    if (engine != kScalar) {
      limits_[engine].raise(known);
      return;
    }
    // The scalar unit issues the instructions of all engines, so what it has waited for is complete before
    // any later instruction of any engine.
    for (int e = 0; e < kEngines; ++e) {
      limits_[e].raise(known);
    }
  }

 private:
  Limits limits_[kEngines];
};

}  // namespace rec_sdk::emulator
