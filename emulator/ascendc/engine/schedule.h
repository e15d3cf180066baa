// The schedule of a core's engines. They execute instructions immediately (eager), only when something must
// wait for them (late), or at random times. An instruction is always checked when it is issued; only its
// effect is delayed.
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

  // Starts the schedule of a core. No task of the previous core may be left.
  void start(int64_t core_index);

  // Executes the effect of an instruction now or later. `effect` may refer to objects on the stack; keep()
  // returns a copy that does not, for later execution.
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
  // Returns whether effects are executed immediately.
  bool eager() const { return eager_; }
  // `of_library` is explained at Core::set_flag(). If such a flag is set several times before it is consumed,
  // the settings are counted, as CANN's code expects.
  void set_flag(int event, int id, bool of_library);
  void wait_flag(int event, int id);
  // Runs the engine, or all engines, until no task is queued.
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
  // Runs engines until the flag is set, but no more tasks than necessary.
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
