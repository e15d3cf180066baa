// The machine that runs the cores of a launch on one thread. Cores are fibers, which yield to each other only
// in SyncAll.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "emulator/ascendc/engine/core.h"
#include "emulator/ascendc/engine/fiber.h"
#include "emulator/ascendc/engine/gm.h"

namespace rec_sdk::emulator {

class Machine {
 public:
  // Returns the machine of the calling thread.
  static Machine& local();

  void run(const char* kernel, int64_t blocks, const std::vector<Buffer>& buffers,
           const std::function<void()>& body);

  Clock& clock() { return clock_; }
  const char* kernel() const { return kernel_; }
  GlobalMemory& gm() { return gm_; }
  // Blocks the core until all cores have called this.
  void sync_all(Core& core);
  // Checks, at the first software SyncAll of a launch, that its workspace is zero.
  void check_workspace(Core& core, const uint8_t* bytes, uint64_t count);

 private:
  // A fiber and the core that runs on it. Several cores run one after another on the same fiber, until one of
  // them waits in SyncAll.
  struct Lane {
    Lane(Machine& machine) : core(machine, *(ub = std::make_unique<UnifiedBuffer>())) {}
    std::unique_ptr<UnifiedBuffer> ub;
    Core core;
    std::unique_ptr<Fiber> fiber;
    bool waiting = false;
    bool busy = false;
  };

  void restart_clock();
  void draw_order(int64_t blocks);
  void run_lane(Lane& lane);
  void run_core(Lane& lane, int64_t index);
  Lane& free_lane();
  void resume(Lane& lane);
  void resume_waiting();
  void abandon();

  Clock clock_;
  GlobalMemory gm_;
  std::vector<std::unique_ptr<Lane>> lanes_;

  // The state of the present launch.
  const char* kernel_ = "";
  const std::function<void()>* body_ = nullptr;
  int64_t blocks_ = 0;
  std::vector<int64_t> order_;
  size_t started_ = 0;
  int64_t finished_ = 0;
  std::vector<Lane*> waiting_;
  std::vector<Counters> counters_;
  bool soft_synced_ = false;
  std::exception_ptr error_;
};

}  // namespace rec_sdk::emulator
