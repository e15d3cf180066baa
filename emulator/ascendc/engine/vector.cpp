// The vector unit.
#include <algorithm>
#include <cstring>

#include "emulator/ascendc/engine/instructions.h"
#include "emulator/ascendc/engine/operands.h"
#include "emulator/ascendc/engine/queue.h"
#include "emulator/ascendc/engine/strided.h"
#include "emulator/ascendc/engine/text.h"
#include "emulator/ascendc/engine/vector_rates.h"

namespace rec_sdk::emulator {
namespace {

// An instruction may work in place, but not on bytes that overlap in any other way.
void check_overlap(Core& core, const UbSpan& dst, const UbSpan& src, bool same_places, const char* role) {
  if (dst.overlaps(src) && !same_places) {
    core.fail(text("dst [%u, %u) overlaps %s [%u, %u): only the same tensor may be both", dst.address,
                   dst.end(), role, src.address, src.end()));
  }
}

// The function on the values of the operands; those that an instruction lacks have no address.
void apply(UnifiedBuffer& ub, const VectorCall& call, const Operand& dst, const Operand (&sources)[2],
           int source_count, const void* scalar, int64_t count) {
  const auto run = [&](uint32_t to, uint32_t a, uint32_t b, int64_t n) {
    call.function(ub.at(to), source_count > 0 ? ub.at(a) : nullptr, source_count > 1 ? ub.at(b) : nullptr,
                  scalar, n);
    if (call.saturate != nullptr) call.saturate(ub.at(to), n);
  };
  const bool side_by_side = dst.strides().side_by_side() && sources[0].strides().side_by_side() &&
                            sources[1].strides().side_by_side();
  if (side_by_side) {
    return run(dst.whole().address, sources[0].whole().address, sources[1].whole().address, count);
  }
  for (int64_t i = 0; i < dst.blocks(); ++i) {
    const UbSpan to = dst.block(i);
    run(to.address, sources[0].block(i).address, sources[1].block(i).address, to.bytes / call.dst_bytes);
  }
}

// Values that an instruction works on. One that is given its count puts the mask of the kernel's start back
// when it ends.
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

// A flag that is set and waited for at once.
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
  Operand sources[2];
  int source_count = 0;
  for (const auto& [tensor, strides] : {std::pair{call.a, call.a_strides}, {call.b, call.b_strides}}) {
    if (tensor == nullptr) continue;
    const char* role = source_count == 0 ? "src0" : "src1";
    const Operand source(core, *tensor, values, call.src_bytes, strides, role);
    check_overlap(core, dst.whole(), source.whole(), source.same_places(dst), role);
    source.each([&](const UbSpan& span) { core.check_read(span); });
    sources[source_count++] = source;
  }
  if (call.reads_dst) {
    dst.each([&](const UbSpan& span) { core.check_read(span); });
  }
  dst.each([&](const UbSpan& span) { core.check_write(span); });
  int64_t cycles = vector_cycles(call.name, values, std::max(call.dst_bytes, call.src_bytes));
  for (int i = 0; i < source_count; ++i) {
    sources[i].each([&](const UbSpan& span) { core.mark_read(span); });
    cycles = std::max(cycles, sources[i].cycles());
  }
  dst.each([&](const UbSpan& span) { core.mark_written(span); });
  uint64_t scalar = 0;
  if (call.scalar != nullptr) {
    std::memcpy(&scalar, call.scalar, call.src_bytes != 0 ? call.src_bytes : call.dst_bytes);
  }
  VectorCall now = call;
  if (!core.saturates()) now.saturate = nullptr;
  core.schedule.run(kVector, [now, dst, sources, source_count, scalar, count = values, &ub = core.ub] {
    apply(ub, now, dst, sources, source_count, &scalar, count);
  });
  count_instruction(core, values, std::max(cycles, dst.cycles()));
}

// As CANN's library does on 2201: the vector unit sums into a register, the scalar unit stores it, and flags
// of the pipe order both.
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

// 950 has 16 bits for the index of a 16-bit element; A2 and A3 have 32 bits for its byte.
constexpr uint32_t kMostOffset16 = (1u << 17) - 1;

void check_reach(Core& core, Stamp issued, uint32_t offset, int64_t i, uint32_t element_bytes) {
  if (REC_SDK_ASCENDC_ARCH == 3510 && element_bytes == 2 && offset > kMostOffset16) {
    core.fail(text("srcOffset[%ld] of %s is %u: for 16-bit elements 950 reaches %u", static_cast<long>(i),
                   core.describe(issued).c_str(), offset, kMostOffset16));
  }
}

// Element i, at byte `begin` of src.
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
  // Which bytes are read is known when it runs: their order is checked only if that is at once.
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
