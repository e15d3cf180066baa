// The instructions of the vector unit.
#include <algorithm>
#include <array>
#include <cstring>

#include "emulator/ascendc/engine/instructions.h"
#include "emulator/ascendc/engine/operands.h"
#include "emulator/ascendc/engine/queue.h"
#include "emulator/ascendc/engine/strided.h"
#include "emulator/ascendc/engine/text.h"
#include "emulator/ascendc/engine/vector_rates.h"

namespace rec_sdk::emulator {
namespace {

// Checks that dst and src are identical or do not overlap. Identical operands are allowed, because
// instructions may work in place.
void check_overlap(Core& core, const UbSpan& dst, const UbSpan& src, bool same_places, const char* role) {
  if (dst.overlaps(src) && !same_places) {
    core.fail(text("dst [%u, %u) overlaps %s [%u, %u): only the same tensor may be both", dst.address,
                   dst.end(), role, src.address, src.end()));
  }
}

using Sources = std::array<Operand, 2>;

// The effect of an instruction on values. It depends on the control register when the instruction is issued.
struct Effect {
  ElementFunction function;
  SaturateFunction saturate;  // null: no saturation
  uint32_t dst_bytes;         // bytes of an element
};

Effect effect_of(const Core& core, const VectorCall& call) {
  const bool saturating = call.saturating != nullptr && core.saturates_integers();
  return {saturating ? call.saturating : call.function, core.saturates() ? call.saturate : nullptr,
          call.dst_bytes};
}

// Applies the function to the values of the operands. It gets a null pointer for an operand that the
// instruction does not have.
void apply(UnifiedBuffer& ub, const Effect& effect, const Operand& dst, const Sources& sources,
           const void* scalar) {
  const auto at = [&](const Operand& operand, uint64_t begin) {
    return operand.exists() ? ub.at(operand.part(begin, kUbBlock).address) : nullptr;
  };
  const auto run = [&](uint64_t begin, uint64_t bytes) {
    const auto count = static_cast<int64_t>(bytes / effect.dst_bytes);
    effect.function(at(dst, begin), at(sources[0], begin), at(sources[1], begin), scalar, count);
    if (effect.saturate != nullptr) effect.saturate(at(dst, begin), count);
  };
  const auto side_by_side = [](const Operand& operand) { return operand.strides().side_by_side(); };
  if (side_by_side(dst) && side_by_side(sources[0]) && side_by_side(sources[1])) {
    return run(0, dst.bytes());
  }
  // If operands have strides, all operands have elements of the same size.
  const uint64_t most = std::min({dst.run_bytes(), sources[0].run_bytes(), sources[1].run_bytes()});
  for (uint64_t begin = 0; begin < dst.bytes(); begin += most) {
    run(begin, std::min(most, dst.bytes() - begin));
  }
}

void check_read(const Core& core, const Operand& operand) {
  bool allowed = true;
  operand.each([&](const UbSpan& span) { allowed &= core.ub.may_read(span, core.limits()); });
  if (!allowed) operand.each_block([&](const UbSpan& span) { core.check_read(span); });
}

void check_write(const Core& core, const Operand& operand) {
  bool allowed = true;
  operand.each([&](const UbSpan& span) { allowed &= core.ub.may_write(span, core.limits()); });
  if (!allowed) operand.each_block([&](const UbSpan& span) { core.check_write(span); });
}

// Returns the number of values that an instruction processes. An instruction with a count resets the mask to
// its initial state.
int64_t values_of(Core& core, int64_t count) {
  if (count == kByMask) {
    if (!core.mask.counter || core.mask.count == VectorMask::kAll) {
      core.fail(
          "isSetMask = false, and no mask counts: SetMaskCount and SetVectorMask<T, MaskMode::COUNTER> must "
          "come "
          "before");
    }
    return core.mask.count;
  }
  if (!core.mask.at_start()) {
    core.fail(
        "sets a mask of its own, and so ends what SetMaskCount and SetVectorMask began: SetMaskNorm and "
        "ResetMask "
        "must come before");
  }
  return count;
}

bool is_nothing(Core& core, int64_t count) {
  if (count < 0) {
    core.fail(text("count %ld", static_cast<long>(count)));
  }
  if (count == 0 && REC_SDK_ASCENDC_ARCH == 3510) {
    core.fail("count 0: only A2 and A3 do nothing then");
  }
  return count == 0;
}

void count_instruction(Core& core, int64_t count, int64_t cycles) {
  core.counters.vector_instructions += 1;
  core.counters.vector_elements += count;
  core.counters.vector_cycles += cycles;
}

// Orders engine `to` after engine `from`: sets a flag and waits for it immediately.
void pass(Core& core, Engine from, Engine to) {
  const int event = event_index(from, to);
  const int id = fetch_flag(event);
  core.set_flag(event, id, true);
  core.wait_flag(event, id);
}

}  // namespace

void run_vector(const VectorCall& call) {
  Core& core = current_core();
  core.issue(kVector, call.name);
  if (call.function == nullptr) {
    core.fail("this pair of types has no such RoundMode");
  }
  if (call.repeats != 1) {
    core.fail(
        text("repeatTime %u: where the mask counts elements it says nothing, and must be 1", call.repeats));
  }
  const int64_t values = values_of(core, call.count);
  if (is_nothing(core, values)) {
    return;
  }
  const Operand dst(core, *call.dst, values, call.dst_bytes, call.dst_strides, "dst");
  if (call.dst_strides.block == 0 || call.dst_strides.repeat == 0) {
    core.fail("dst has a stride of 0: its elements would lie on top of each other");
  }
  Sources sources;
  const auto check_source = [&](const UbTensor* tensor, const Strides& strides, const char* role,
                                Operand& source) {
    if (tensor == nullptr) return;
    source = Operand(core, *tensor, values, call.src_bytes, strides, role);
    check_overlap(core, dst.whole(), source.whole(), source.same_places(dst), role);
    check_read(core, source);
  };
  check_source(call.a, call.a_strides, "src0", sources[0]);
  check_source(call.b, call.b_strides, "src1", sources[1]);
  if (call.reads_dst) {
    check_read(core, dst);
  }
  check_write(core, dst);
  int64_t cycles =
      std::max(vector_cycles(call.name, values, std::max(call.dst_bytes, call.src_bytes)), dst.cycles());
  for (const Operand& source : sources) {
    source.each([&](const UbSpan& span) { core.mark_read(span); });
    cycles = std::max(cycles, source.cycles());
  }
  dst.each([&](const UbSpan& span) { core.mark_written(span); });
  const Effect effect = effect_of(core, call);
  core.schedule.run(
      kVector, [&] { apply(core.ub, effect, dst, sources, call.scalar); },
      [&] {
        uint64_t scalar = 0;
        if (call.scalar != nullptr) {
          std::memcpy(&scalar, call.scalar, call.src_bytes != 0 ? call.src_bytes : call.dst_bytes);
        }
        return [effect, dst, sources, scalar, &ub = core.ub] { apply(ub, effect, dst, sources, &scalar); };
      });
  count_instruction(core, values, cycles);
}

// On 2201 this follows CANN's library: the vector unit adds into a register, the scalar unit stores the
// register, and flags of the pipe order the two.
void reduce(const UbTensor& dst, const UbTensor& src, const UbTensor& scratch, int64_t count,
            uint32_t element_bytes, ElementFunction function, SaturateFunction saturate) {
  static_cast<void>(scratch);
  Core& core = current_core();
  core.issue(kVector, "ReduceSum");
  if (!core.buffers.piped) {
    core.fail("needs a TPipe, from which it takes its flags");
  }
  if (is_nothing(core, values_of(core, count))) {
    return;
  }
  const UbSpan from = aligned_operand(core, src, static_cast<uint64_t>(count) * element_bytes, "src");
  const UbSpan to = operand(core, dst, element_bytes, "dst");
  core.check_read(from);
  core.mark_read(from);
  count_instruction(core, count, vector_cycles("ReduceSum", count, element_bytes));
  core.schedule.finish(kVector);
  alignas(8) uint8_t sum[8];
  function(sum, core.ub.at(from.address), nullptr, nullptr, count);
  if (core.saturates() && saturate != nullptr) {
    saturate(sum, 1);
  }
  pass(core, kVector, kScalar);
  core.issue(kScalar, "ReduceSum");
  core.check_write(to);
  core.mark_written(to);
  std::memcpy(core.ub.at(to.address), sum, element_bytes);
  pass(core, kScalar, kVector);
  pass(core, kScalar, kMte3);
}

namespace {

// The index of a 16-bit element has 16 bits on 950, which bounds its byte offset. On A2 and A3 the byte
// offset has 32 bits.
constexpr uint32_t kMostOffset16 = (1u << 17) - 1;

void check_reach(Core& core, Stamp issued, uint32_t offset, int64_t i, uint32_t element_bytes) {
  if (REC_SDK_ASCENDC_ARCH == 3510 && element_bytes == 2 && offset > kMostOffset16) {
    core.fail(text("srcOffset[%ld] of %s is %u: for 16-bit elements 950 reaches %u", static_cast<long>(i),
                   core.describe(issued).c_str(), offset, kMostOffset16));
  }
}

// Returns the span of element i, which is at byte `begin` of src, and checks it.
UbSpan gathered(Core& core, Stamp issued, const UbSpan& from, uint64_t begin, int64_t i,
                uint32_t element_bytes) {
  if (begin % element_bytes != 0 || begin + element_bytes > from.bytes) {
    core.fail(
        text("srcOffset[%ld] of %s leads to byte %lu of src, which has %u: it must lie inside and be a "
             "multiple of %u",
             static_cast<long>(i), core.describe(issued).c_str(), begin, from.bytes, element_bytes));
  }
  return {from.address + static_cast<uint32_t>(begin), element_bytes};
}

}  // namespace

void gather(const UbTensor& dst, const UbTensor& src, const UbTensor& offsets, uint32_t base, int64_t count,
            uint32_t element_bytes) {
  Core& core = current_core();
  core.issue(kVector, "Gather");
  if (is_nothing(core, values_of(core, count))) {
    return;
  }
  const auto elements = static_cast<uint64_t>(count);
  const UbSpan to = aligned_operand(core, dst, elements * element_bytes, "dst");
  const UbSpan at = aligned_operand(core, offsets, elements * sizeof(uint32_t), "srcOffset");
  const UbSpan from = aligned_operand(core, src, src.bytes, "src");
  check_overlap(core, to, at, false, "srcOffset");
  check_overlap(core, to, from, false, "src");
  core.check_read(at);
  core.check_write(to);
  // Which bytes are read is known only at execution, so the order of these reads is checked only if
  // instructions are executed immediately.
  core.schedule.run(kVector, [=, &core, issued = core.stamp(), checks = core.schedule.eager()] {
    for (int64_t i = 0; i < count; ++i) {
      uint32_t offset;
      std::memcpy(&offset, core.ub.at(at.address) + i * 4, 4);
      check_reach(core, issued, offset, i, element_bytes);
      const UbSpan element = gathered(core, issued, from, base + uint64_t{offset}, i, element_bytes);
      if (checks) {
        core.check_read(element);
        core.mark_read(element);
      }
      std::memcpy(core.ub.at(to.address) + i * element_bytes, core.ub.at(element.address), element_bytes);
    }
  });
  core.mark_read(at);
  core.mark_written(to);
  count_instruction(core, count, vector_cycles("Gather", count, element_bytes));
}

}  // namespace rec_sdk::emulator
