// When the engines of a core do what they were told: at once (eager), only when something must wait for it
// (late), or at random. All that is checked of an instruction is checked when it is issued; this moves its
// effect.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <utility>

#include "emulator/ascendc/engine/names.h"
#include "emulator/settings.h"

namespace rec_sdk::emulator {

class Core;

class Schedule {
 public:
  explicit Schedule(Core& core) : core_(core) {}

  // A core starts: nothing is left of the last one.
  void start(int64_t core_index);

  // `effect` may refer to what is on the stack; `keep()` gives one that does not.
  template <class Effect, class Keep>
  void run(Engine engine, const Effect& effect, const Keep& keep) {
    if (eager_) {
      effect();
    } else {
      add(engine, {Kind::kEffect, 0, 0, false, keep()});
    }
  }
  template <class Effect>
  void run(Engine engine, const Effect& effect) {
    run(engine, effect, [&] { return effect; });
  }
  // Whether effects are immediate.
  bool eager() const { return eager_; }
  // `of_library`: see Core::set_flag; such a flag counts, as CANN's code takes for granted.
  void set_flag(int event, int id, bool of_library);
  void wait_flag(int event, int id);
  // Until the engine has nothing left, or all have.
  void finish(Engine engine);
  void finish_all();

 private:
  enum class Kind : uint8_t { kEffect, kSet, kWait };
  struct Task {
    Kind kind;
    int event, id;
    bool of_library;
    std::function<void()> effect;
  };

  void add(Engine engine, Task task);
  bool step(int engine);
  // Runs engines until the flag is up, and no more than that needs.
  void raise(int event, int id);
  void set(const Task& task);
  uint64_t random();

  Core& core_;
  bool eager_ = true;
  uint64_t random_state_ = 0;
  std::deque<Task> queues_[kEngines];
  int up_[kEventTypes][kEventIds] = {};
};

}  // namespace rec_sdk::emulator
