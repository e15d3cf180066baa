// An emulated vector core: its clock, engines, local memory, flags and buffers.
#pragma once

#include <cstdint>
#include <string>

#include "emulator/ascendc/engine/buffers.h"
#include "emulator/ascendc/engine/clock.h"
#include "emulator/ascendc/engine/counters.h"
#include "emulator/ascendc/engine/data_cache.h"
#include "emulator/ascendc/engine/flags.h"
#include "emulator/ascendc/engine/order.h"
#include "emulator/ascendc/engine/schedule.h"
#include "emulator/ascendc/engine/unified_buffer.h"
#include "emulator/ascendc/launch.h"

namespace rec_sdk::emulator {

class GlobalMemory;
class Machine;

// The mode of copies out of local memory: SetAtomicAdd<T>() and similar calls make them atomic.
struct AtomicState {
  bool on = false;
  const char* type = nullptr;  // like Copy::type
  void (*combine)(void* gm, const void* ub, uint64_t bytes) = nullptr;
};

// Bits of the control register (CTRL). The register keeps its value after a kernel, so each kernel must
// restore it.
constexpr uint64_t kKeepsInfinity = uint64_t{1} << 48;     // 16-bit floats do not saturate
constexpr uint64_t kIntegersSaturate = uint64_t{1} << 53;  // on 950 only: integers saturate
constexpr uint64_t kForAllOfCore = uint64_t{1} << 60;      // on 950 only: bit 48 has an effect
constexpr uint64_t kControlBits =
    REC_SDK_ASCENDC_ARCH == 3510 ? kKeepsInfinity | kIntegersSaturate | kForAllOfCore : kKeepsInfinity;
constexpr uint64_t kControlAtStart = REC_SDK_ASCENDC_ARCH == 3510 ? kForAllOfCore : 0;

// The mask that vector instructions without a count use.
struct VectorMask {
  static constexpr int64_t kAll = -1;
  bool counter = false;  // whether it is a number of values; otherwise it is one bit per value of a repeat
  int64_t count = kAll;

  bool at_start() const { return !counter && count == kAll; }
};

class Core {
 public:
  Core(Machine& machine, UnifiedBuffer& ub);

  void start(int64_t index, int64_t blocks);
  // Checks the rules for the end of a kernel.
  void finish();

  // Begins the next instruction, which `engine` executes. `name` must be a string literal.
  void issue(Engine engine, const char* name) {
    if (clock_.now() == Clock::kLastTime) {
      clock_ran_out();
    }
    name_ = name;
    stamp_ = stamp_of(clock_.tick(name), engine);
  }
  Stamp stamp() const { return stamp_; }
  Engine engine() const { return static_cast<Engine>(stamp_engine(stamp_)); }
  const Limits& limits() const { return order.limits(stamp_engine(stamp_)); }
  int32_t time() const { return stamp_time(stamp_); }

  // Check and record accesses of the current instruction to local memory. All checks of an instruction must
  // precede its records, because it may write to its own operand.
  void check_read(UbSpan span) const {
    if (!ub.may_read(span, limits())) {
      refuse_read(span);
    }
  }
  void check_write(UbSpan span) const {
    if (!ub.may_write(span, limits())) {
      refuse_write(span);
    }
  }
  void mark_read(UbSpan span) { ub.mark_read(span, stamp_); }
  void mark_written(UbSpan span) { ub.mark_written(span, stamp_); }

  // `of_library` is true for flags of CANN's queues. They use the lowest free flag even if it may not be
  // consumed yet, which is not an error of the kernel.
  void set_flag(int event, int32_t id, bool of_library = false);
  void wait_flag(int event, int32_t id);
  void barrier(Engine engine);
  void barrier_all();
  bool saturates() const {
    constexpr uint64_t kKeep = REC_SDK_ASCENDC_ARCH == 3510 ? kKeepsInfinity | kForAllOfCore : kKeepsInfinity;
    return (control & kKeep) != kKeep;
  }
  bool saturates_integers() const { return (control & kIntegersSaturate) != 0; }

  // Ends the launch with an error. `rule` describes what the instruction does and what is allowed.
  [[noreturn]] void fail(const std::string& rule) const;
  // Records an error where throwing is impossible, such as in a destructor. The first recorded error is
  // thrown when the core ends.
  void fail_later(const KernelError& error);
  // Describes an instruction, such as "Add (V, instruction 12)".
  std::string describe(Stamp stamp) const;
  // Returns the call that would order an instruction of engine `to` after an instruction of engine `from`.
  static std::string cure(int from, int to);

  GlobalMemory& gm() const { return gm_; }
  Machine& machine() const { return machine_; }

  int64_t index = 0;
  int64_t blocks = 0;
  UnifiedBuffer& ub;
  Order order;
  Flags flags;
  Schedule schedule;
  LocalBuffers buffers;
  DataCache data_cache;
  AtomicState atomic;
  VectorMask mask;
  uint64_t control = kControlAtStart;
  Counters counters;

 private:
  std::string where(const char* engine, const char* name) const;
  void check_consumed(int event, int32_t id) const;
  void check_control() const;
  [[noreturn]] void refuse_read(UbSpan span) const;
  [[noreturn]] void refuse_write(UbSpan span) const;
  [[noreturn]] void clock_ran_out() const;

  Machine& machine_;
  Clock& clock_;
  GlobalMemory& gm_;
  Stamp stamp_ = 0;
  const char* name_ = "";
  int32_t start_time_ = 0;
  std::string later_;
};

// The core that runs on this thread; null outside of kernels, where AscendC calls throw std::logic_error.
// Every instruction accesses the variable, and initial-exec makes that fast. initial-exec is possible because
// this library is never unloaded.
extern __thread Core* running_core __attribute__((tls_model("initial-exec")));
[[noreturn]] void no_core();
inline Core& current_core() {
  if (running_core == nullptr) {
    no_core();
  }
  return *running_core;
}

}  // namespace rec_sdk::emulator
