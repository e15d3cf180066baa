#include "emulator/ascendc/engine/machine.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "emulator/ascendc/engine/text.h"
#include "emulator/settings.h"

namespace rec_sdk::emulator {
namespace {

uint64_t next_random(uint64_t& state) {  // splitmix64
  state += 0x9e3779b97f4a7c15u;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

Machine& Machine::local() {
  // The object is on the heap, because a library that is loaded late gets little more thread-local memory
  // than a pointer needs.
  thread_local const std::unique_ptr<Machine> machine(new Machine());
  return *machine;
}

void Machine::restart_clock() {
  clock_.restart();
  gm_.forget_times();
  for (const auto& lane : lanes_) {
    lane->ub->forget_times();
  }
}

void Machine::draw_order(int64_t blocks) {
  order_.resize(static_cast<size_t>(blocks));
  uint64_t state = settings().seed;
  for (int64_t i = 0; i < blocks; ++i) {
    const auto other = static_cast<size_t>(next_random(state) % static_cast<uint64_t>(i + 1));
    order_[static_cast<size_t>(i)] = order_[other];
    order_[other] = i;
  }
}

void Machine::run(const char* kernel, int64_t blocks, const std::vector<Buffer>& buffers,
                  const std::function<void()>& body) {
  if (running_core != nullptr) {
    throw std::logic_error("a kernel cannot launch a kernel");
  }
  if (clock_.now() > Clock::kLastTime / 2) {
    restart_clock();
  }
  kernel_ = kernel;
  blocks_ = blocks;
  body_ = &body;
  draw_order(blocks);
  started_ = 0;
  finished_ = 0;
  soft_synced_ = false;
  error_ = nullptr;
  counters_.assign(static_cast<size_t>(blocks), Counters{});
  gm_.begin_launch(buffers, clock_.now());
  while (error_ == nullptr && finished_ < blocks_) {
    if (started_ < order_.size()) {
      resume(free_lane());
    } else {
      resume_waiting();
    }
  }
  abandon();
  const std::string unwritten = error_ == nullptr ? gm_.unwritten_output() : "";
  gm_.end_launch();
  if (error_ != nullptr) {
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
  if (!unwritten.empty()) {
    throw KernelError(
        text("kernel '%s', %ld cores: ends, and nothing has written ", kernel, static_cast<long>(blocks)) +
        unwritten);
  }
  count_launch(kernel, counters_);
}

Machine::Lane& Machine::free_lane() {
  for (const auto& lane : lanes_) {
    if (!lane->busy) {
      return *lane;
    }
  }
  lanes_.push_back(std::make_unique<Lane>(*this));
  Lane& lane = *lanes_.back();
  lane.fiber = std::make_unique<Fiber>([this, &lane] { run_lane(lane); });
  return lane;
}

void Machine::resume(Lane& lane) {
  gm_.begin_segment(clock_.now());
  running_core = &lane.core;
  lane.busy = true;
  lane.fiber->resume();
  running_core = nullptr;
}

void Machine::run_lane(Lane& lane) {
  while (error_ == nullptr && started_ < order_.size()) {
    run_core(lane, order_[started_++]);
  }
  lane.busy = false;
}

void Machine::run_core(Lane& lane, int64_t index) {
  gm_.begin_segment(clock_.now());
  lane.core.start(index, blocks_);
  try {
    (*body_)();
    lane.core.finish();
  } catch (...) {
    if (error_ == nullptr) {
      error_ = std::current_exception();
    }
    return;
  }
  counters_[static_cast<size_t>(index)] = lane.core.counters;
  ++finished_;
}

void Machine::sync_all(Core& core) {
  if (finished_ > 0) {
    core.fail(text("%ld cores have ended without it, so that the others wait for ever",
                   static_cast<long>(finished_)));
  }
  core.schedule.finish_all();
  for (const auto& lane : lanes_) {
    if (&lane->core == &core) {
      waiting_.push_back(lane.get());
      lane->fiber->stop();
      break;
    }
  }
  core.order.complete_all(clock_.now());
}

void Machine::check_workspace(Core& core, const uint8_t* bytes, uint64_t count) {
  for (uint64_t i = 0; !soft_synced_ && i < count; ++i) {
    if (bytes[i] != 0) {
      core.fail(text("byte %lu of the global workspace is not zero: it must be zeroed before the launch", i));
    }
  }
  soft_synced_ = true;
}

void Machine::resume_waiting() {
  std::vector<Lane*> lanes;
  lanes.swap(waiting_);
  if (static_cast<int64_t>(lanes.size()) < blocks_) {
    Core& core = lanes.front()->core;
    try {
      core.fail(text("%ld cores have ended without it, so that the others wait for ever",
                     static_cast<long>(finished_)));
    } catch (...) {
      error_ = std::current_exception();
    }
    return;
  }
  gm_.begin_phase(clock_.now());
  for (Lane* lane : lanes) {
    if (error_ == nullptr) {
      resume(*lane);
    }
  }
}

void Machine::abandon() {
  waiting_.clear();
  for (const auto& lane : lanes_) {
    if (lane->busy) {
      lane->fiber->rewind();
      lane->busy = false;
    }
  }
}

void run_kernel(const char* kernel, int64_t blocks, const std::vector<Buffer>& buffers,
                const std::function<void()>& body) {
  if (blocks < 1) {
    throw std::invalid_argument(
        text("kernel '%s': %ld blocks; at least 1", kernel, static_cast<long>(blocks)));
  }
  Machine::local().run(kernel, blocks, buffers, body);
}

}  // namespace rec_sdk::emulator
