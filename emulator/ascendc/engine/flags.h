// The flags between the engines of a core, and the ids of flags that queues have allocated.
#pragma once

#include <cstdint>

#include "emulator/ascendc/engine/order.h"

namespace rec_sdk::emulator {

class Flags {
 public:
  void clear() {
    for (int event = 0; event < kEventTypes; ++event) {
      set_[event] = taken_[event] = waited_[event] = 0;
    }
  }
  bool is_set(int event, int id) const { return (set_[event] >> id & 1) != 0; }
  bool any_set(int event) const { return set_[event] != 0; }
  void set(int event, int id, const Limits& known, Stamp setter) {
    set_[event] = static_cast<uint8_t>(set_[event] | 1 << id);
    known_[event][id] = known;
    setter_[event][id] = setter;
  }
  const Limits& take(int event, int id, Stamp waiter) {
    set_[event] = static_cast<uint8_t>(set_[event] & ~(1 << id));
    waited_[event] = static_cast<uint8_t>(waited_[event] | 1 << id);
    waiter_[event][id] = waiter;
    return known_[event][id];
  }
  Stamp setter(int event, int id) const { return setter_[event][id]; }
  // Returns whether any WaitFlag has consumed the flag so far; waiter() returns the latest one.
  bool was_waited_for(int event, int id) const { return (waited_[event] >> id & 1) != 0; }
  Stamp waiter(int event, int id) const { return waiter_[event][id]; }

  // Returns the lowest id that is not allocated; -1 if all are.
  int free_id(int event) const {
    const int free = ~taken_[event] & 0xff;
    return free == 0 ? -1 : __builtin_ctz(static_cast<unsigned>(free));
  }
  void allocate(int event, int id) { taken_[event] = static_cast<uint8_t>(taken_[event] | 1 << id); }
  void release(int event, int id) { taken_[event] = static_cast<uint8_t>(taken_[event] & ~(1 << id)); }
  bool is_allocated(int event, int id) const { return (taken_[event] >> id & 1) != 0; }

 private:
  uint8_t set_[kEventTypes] = {};
  uint8_t taken_[kEventTypes] = {};
  uint8_t waited_[kEventTypes] = {};
  Limits known_[kEventTypes][kEventIds];
  Stamp setter_[kEventTypes][kEventIds];
  Stamp waiter_[kEventTypes][kEventIds];
};

}  // namespace rec_sdk::emulator
