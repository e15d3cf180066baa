#include "emulator/ascendc/engine/schedule.h"

#include <cstring>

#include "emulator/ascendc/engine/core.h"
#include "emulator/ascendc/engine/text.h"

namespace rec_sdk::emulator {

void Schedule::start(int64_t core_index) {
  const Streaming& order = settings().engines;
  eager_ = order.order == StreamOrder::kEager;
  random_state_ = order.order == StreamOrder::kRandom
                      ? (order.seed + 1) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(core_index)
                      : 0;
  for (auto& queue : queues_) {
    queue.clear();
  }
  std::memset(up_, 0, sizeof up_);
}

uint64_t Schedule::random() {  // splitmix64
  uint64_t z = random_state_ += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void Schedule::add(Engine engine, Task task) {
  queues_[engine].push_back(std::move(task));
  if (random_state_ == 0) {
    return;
  }
  for (uint64_t steps = random() % 4; steps > 0; --steps) {
    step(static_cast<int>(random() % kEngines));
  }
}

void Schedule::set(const Task& task) {
  int& up = up_[task.event][task.id];
  if (up > 0 && !task.of_library) {
    core_.fail(text("flag %s %d is set while the last set of it is still up: one of the two is lost",
                    kEvents[task.event].name, task.id));
  }
  ++up;
}

bool Schedule::step(int engine) {
  auto& queue = queues_[engine];
  if (queue.empty()) {
    return false;
  }
  const Task& task = queue.front();
  if (task.kind == Kind::kEffect) {
    task.effect();
  } else if (task.kind == Kind::kSet) {
    set(task);
  } else {
    int& up = up_[task.event][task.id];
    if (up == 0) {
      return false;
    }
    --up;
  }
  queue.pop_front();
  return true;
}

void Schedule::raise(int event, int id) {
  const int from = kEvents[event].from;
  while (up_[event][id] == 0) {
    if (step(from)) {
      continue;
    }
    if (queues_[from].empty()) {
      core_.fail(text("flag %s %d never comes up: the engines wait for ever", kEvents[event].name, id));
    }
    raise(queues_[from].front().event, queues_[from].front().id);
  }
}

void Schedule::set_flag(int event, int id, bool of_library) {
  if (eager_) {
    return;
  }
  Task task{Kind::kSet, event, id, of_library, {}};
  if (kEvents[event].from == kScalar) {
    set(task);
  } else {
    add(kEvents[event].from, std::move(task));
  }
}

void Schedule::wait_flag(int event, int id) {
  if (eager_) {
    return;
  }
  if (kEvents[event].to == kScalar) {
    raise(event, id);
    --up_[event][id];
  } else {
    add(kEvents[event].to, {Kind::kWait, event, id, false, {}});
  }
}

void Schedule::finish(Engine engine) {
  while (!queues_[engine].empty()) {
    if (!step(engine)) {
      raise(queues_[engine].front().event, queues_[engine].front().id);
    }
  }
}

void Schedule::finish_all() {
  for (const Engine engine : {kVector, kMte2, kMte3}) {
    finish(engine);
  }
}

}  // namespace rec_sdk::emulator
