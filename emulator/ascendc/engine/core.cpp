#include "emulator/ascendc/engine/core.h"

#include <stdexcept>

#include "emulator/ascendc/engine/gm.h"
#include "emulator/ascendc/engine/machine.h"
#include "emulator/ascendc/engine/text.h"

namespace rec_sdk::emulator {

__thread Core* running_core = nullptr;

void no_core() { throw std::logic_error("AscendC calls work inside a kernel only: see run_kernel()"); }

Core::Core(Machine& machine, UnifiedBuffer& ub)
    : ub(ub), schedule(*this), machine_(machine), clock_(machine.clock()), gm_(machine.gm()) {}

void Core::start(int64_t core_index, int64_t block_count) {
  index = core_index;
  blocks = block_count;
  start_time_ = clock_.now();
  stamp_ = limit_of(start_time_);
  name_ = "start";
  order.complete_all(start_time_);
  ub.forget(stamp_);
  flags.clear();
  schedule.start(core_index);
  buffers.clear();
  data_cache.clear();
  atomic = {};
  control = kControlAtStart;
  mask = {};
  counters = {};
  later_.clear();
}

void Core::finish() {
  if (!later_.empty()) {
    throw KernelError(later_);
  }
  schedule.finish_all();
  name_ = "end of the kernel";
  stamp_ = stamp_of(clock_.now(), kScalar);
  for (int event = 0; event < kEventTypes; ++event) {
    for (int id = 0; flags.any_set(event) && id < kEventIds; ++id) {
      if (flags.is_set(event, id)) {
        fail(text("flag %s %d, set by %s, was never waited for", kEvents[event].name, id,
                  describe(flags.setter(event, id)).c_str()));
      }
    }
  }
  if (data_cache.any_dirty()) {
    fail(text(
        "%ld lines written by SetValue are still in the data cache: DataCacheCleanAndInvalid must follow "
        "the writes, with their address or one before it in the line",
        static_cast<long>(data_cache.dirty_lines())));
  }
  if (atomic.on) {
    fail("atomic copies are still on: SetAtomicNone must end them");
  }
  if (!mask.at_start()) {
    fail(
        "the mask is not as it was when the kernel began: SetMaskNorm and ResetMask must end what "
        "SetMaskCount began");
  }
  check_control();
}

void Core::check_control() const {
  struct Bit {
    uint64_t bit;
    const char* effect;
  };
  constexpr Bit kBits[] = {{kKeepsInfinity, "16-bit floats do not saturate"},
                           {kIntegersSaturate, "integers saturate"},
                           {kForAllOfCore, "bit 48 has no effect"}};
  for (const Bit& changed : kBits) {
    if (((control ^ kControlAtStart) & changed.bit) != 0) {
      const int now = (control & changed.bit) != 0 ? 1 : 0;
      fail(text(
          "bit %d of the control register is %d, but was %d when the kernel began: the next kernel would "
          "inherit that %s, so set_ctrl must put back what get_ctrl gave",
          __builtin_ctzll(changed.bit), now, 1 - now, changed.effect));
    }
  }
}

void Core::clock_ran_out() const {
  throw KernelError(
      text("kernel '%s': more than %d instructions in one launch", machine_.kernel(), Clock::kLastTime / 2));
}

void Core::refuse_read(UbSpan span) const {
  const uint32_t block = ub.unordered_write(span, limits());
  if (block != UnifiedBuffer::kNone) {
    const Stamp earlier = ub.last_write(block);
    fail(text("reads local memory [%u, %u) that %s writes, and nothing orders the two: %s", span.address,
              span.end(), describe(earlier).c_str(), cure(stamp_engine(earlier), engine()).c_str()));
  }
  fail(text("reads local memory [%u, %u), where byte %u holds no data: nothing has written it", span.address,
            span.end(), ub.first_unwritten(span)));
}

void Core::refuse_write(UbSpan span) const {
  const Limits& known = limits();
  // Reads are checked first, because they are later than the write, and whatever orders this write after them
  // also orders it after the earlier write.
  const uint32_t block = ub.unordered_read(span, known);
  if (block != UnifiedBuffer::kNone) {
    const Stamp earlier = ub.read_beyond(block, known);
    fail(text("overwrites local memory [%u, %u) that %s still reads, and nothing orders the two: %s",
              span.address, span.end(), describe(earlier).c_str(),
              cure(stamp_engine(earlier), engine()).c_str()));
  }
  const Stamp earlier = ub.last_write(ub.unordered_write(span, known));
  fail(text("writes local memory [%u, %u) that %s writes, and nothing orders the two: %s", span.address,
            span.end(), describe(earlier).c_str(), cure(stamp_engine(earlier), engine()).c_str()));
}

// Checks that a flag is certainly consumed before it is set again: its WaitFlag is issued, but the waiting
// engine may not have executed it yet.
void Core::check_consumed(int event, int32_t id) const {
  const EventType& type = kEvents[event];
  // A WaitFlag of the scalar unit is complete before the scalar unit issues the next instruction.
  if (type.to == kScalar || !flags.was_waited_for(event, id)) {
    return;
  }
  const Stamp waiter = flags.waiter(event, id);
  if (!limits().covers(waiter)) {
    fail(text(
        "sets flag %s %d again, and nothing says that %s has taken the one before, which may be lost: %s, "
        "or another flag",
        type.name, id, describe(waiter).c_str(), cure(type.to, type.from).c_str()));
  }
}

void Core::set_flag(int event, int32_t id, bool of_library) {
  const EventType& type = kEvents[event];
  issue(type.from, "SetFlag");
  if (id < 0 || id >= kEventIds) {
    fail(text("flag id %d of %s: ids are 0 to %d", id, type.name, kEventIds - 1));
  }
  if (flags.is_set(event, id)) {
    fail(text("flag %s %d is already set, by %s, and was not waited for", type.name, id,
              describe(flags.setter(event, id)).c_str()));
  }
  if (!of_library) {
    check_consumed(event, id);
  }
  flags.set(event, id, order.after(type.from, time()), stamp_);
  schedule.set_flag(event, id, of_library);
}

void Core::wait_flag(int event, int32_t id) {
  const EventType& type = kEvents[event];
  issue(type.to, "WaitFlag");
  if (id < 0 || id >= kEventIds) {
    fail(text("flag id %d of %s: ids are 0 to %d", id, type.name, kEventIds - 1));
  }
  if (!flags.is_set(event, id)) {
    fail(text("flag %s %d is not set: the engine waits for ever", type.name, id));
  }
  order.wait(type.to, flags.take(event, id, stamp_));
  schedule.wait_flag(event, id);
}

void Core::barrier(Engine engine) {
  issue(engine, "PipeBarrier");
  order.barrier(engine, time());
}

void Core::barrier_all() {
  issue(kScalar, "PipeBarrier<PIPE_ALL>");
  schedule.finish_all();
  order.complete_all(time());
}

std::string Core::where(const char* engine, const char* name) const {
  return text("kernel '%s', core %ld of %ld, %s, %s (instruction %d): ", machine_.kernel(),
              static_cast<long>(index), static_cast<long>(blocks), engine, name, time() - start_time_);
}

void Core::fail(const std::string& rule) const {
  throw KernelError(where(engine_name(stamp_engine(stamp_)), name_) + rule);
}

void Core::fail_later(const KernelError& error) {
  if (later_.empty()) {
    later_ = error.what();
  }
}

std::string Core::describe(Stamp stamp) const {
  const int32_t time = stamp_time(stamp);
  const char* name = clock_.name_at(time);
  return text("%s (%s, instruction %d)", name == nullptr ? "an earlier instruction" : name,
              engine_name(stamp_engine(stamp)), time - start_time_);
}

std::string Core::cure(int from, int to) {
  if (from == to) {
    return text("PipeBarrier<PIPE_%s>() must stand between them", engine_name(from));
  }
  return text("SetFlag<HardEvent::%s_%s> after the first and WaitFlag before the second, or a queue",
              engine_name(from), engine_name(to));
}

}  // namespace rec_sdk::emulator
