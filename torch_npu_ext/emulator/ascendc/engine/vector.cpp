// The vector unit.
#include <algorithm>
#include <cstring>

#include "torch_npu_ext/emulator/ascendc/engine/instructions.h"
#include "torch_npu_ext/emulator/ascendc/engine/operands.h"
#include "torch_npu_ext/emulator/ascendc/engine/queue.h"
#include "torch_npu_ext/emulator/ascendc/engine/text.h"
#include "torch_npu_ext/emulator/ascendc/engine/vector_rates.h"

namespace rec_sdk::emulator {
namespace {

// An instruction may work in place, but not on bytes that overlap in any other way.
void check_overlap(Core& core, const UbSpan& dst, const UbSpan& src, bool same_size, const char* role) {
  const bool in_place = same_size && dst.address == src.address;
  if (dst.overlaps(src) && !in_place) {
    core.fail(text("dst [%u, %u) overlaps %s [%u, %u): only the same tensor may be both", dst.address,
                   dst.end(), role, src.address, src.end()));
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

void count_instruction(Core& core, const char* name, int64_t count, uint32_t element_bytes) {
  core.counters.vector_instructions += 1;
  core.counters.vector_elements += count;
  core.counters.vector_cycles += vector_cycles(name, count, element_bytes);
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
  if (!call.side_by_side) {
    core.fail("the emulator knows one repeat of values side by side only: 1, {1, 1, 1, 8, 8, 8}");
  }
  const int64_t values = values_of(core, call.count);
  if (is_nothing(core, values)) {
    return;
  }
  const auto count = static_cast<uint64_t>(values);
  const UbSpan dst = aligned_operand(core, *call.dst, count * call.dst_bytes, "dst");
  UbSpan sources[2];
  int source_count = 0;
  for (const UbTensor* tensor : {call.a, call.b}) {
    if (tensor != nullptr) {
      const char* role = source_count == 0 ? "src0" : "src1";
      const UbSpan span = aligned_operand(core, *tensor, count * call.src_bytes, role);
      check_overlap(core, dst, span, call.src_bytes == call.dst_bytes, role);
      core.check_read(span);
      sources[source_count++] = span;
    }
  }
  if (call.reads_dst) {
    core.check_read(dst);
  }
  core.check_write(dst);
  for (int i = 0; i < source_count; ++i) {
    core.mark_read(sources[i]);
  }
  core.mark_written(dst);
  uint64_t scalar = 0;
  if (call.scalar != nullptr) {
    std::memcpy(&scalar, call.scalar, call.src_bytes != 0 ? call.src_bytes : call.dst_bytes);
  }
  core.schedule.run(kVector, [to = core.ub.at(dst.address), scalar, count = values, function = call.function,
                              a = source_count > 0 ? core.ub.at(sources[0].address) : nullptr,
                              b = source_count > 1 ? core.ub.at(sources[1].address) : nullptr,
                              saturate = core.saturates() ? call.saturate : nullptr] {
    function(to, a, b, &scalar, count);
    if (saturate != nullptr) {
      saturate(to, count);
    }
  });
  count_instruction(core, call.name, values, std::max(call.dst_bytes, call.src_bytes));
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
  count_instruction(core, "ReduceSum", count, element_bytes);
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
  count_instruction(core, "Gather", count, element_bytes);
}

}  // namespace rec_sdk::emulator
