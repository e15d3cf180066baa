// The scalar unit: accesses to single values, flags, and the synchronization of cores.
#include <cstring>

#include "emulator/ascendc/engine/gm.h"
#include "emulator/ascendc/engine/instructions.h"
#include "emulator/ascendc/engine/machine.h"
#include "emulator/ascendc/engine/operands.h"
#include "emulator/ascendc/engine/text.h"
#include "emulator/ascendc/soc.h"

namespace rec_sdk::emulator {
namespace {

uint64_t global_address(Core& core, const GmTensor& tensor, uint64_t index, uint64_t element_bytes) {
  if (tensor.bytes != UINT64_MAX && index >= tensor.bytes / element_bytes) {
    core.fail(text("element %lu of a tensor of %lu", index, tensor.bytes / element_bytes));
  }
  const uint64_t address = tensor.address + index * element_bytes;
  if (address % element_bytes != 0) {
    core.fail(text("address %#lx is not a multiple of the element's %lu bytes", address, element_bytes));
  }
  return address;
}

UbSpan local_element(Core& core, const UbTensor& tensor, uint64_t index, uint64_t element_bytes) {
  UbSpan span = operand(core, tensor, (index + 1) * element_bytes, "the tensor");
  span.address += static_cast<uint32_t>(index * element_bytes);
  span.bytes = static_cast<uint32_t>(element_bytes);
  return span;
}

}  // namespace

void load_global(const GmTensor& tensor, uint64_t index, uint64_t element_bytes, void* value) {
  Core& core = current_core();
  core.issue(kScalar, "GlobalTensor::GetValue");
  const uint64_t address = global_address(core, tensor, index, element_bytes);
  copy_element(value, core.gm().load(core, address, element_bytes), element_bytes);
  core.counters.scalar_gm_reads += 1;
}

void store_global(const GmTensor& tensor, uint64_t index, uint64_t element_bytes, const void* value) {
  Core& core = current_core();
  core.issue(kScalar, "GlobalTensor::SetValue");
  const uint64_t address = global_address(core, tensor, index, element_bytes);
  copy_element(core.gm().store(core, address, element_bytes), value, element_bytes);
  core.counters.scalar_gm_writes += 1;
}

void load_local(const UbTensor& tensor, uint64_t index, uint64_t element_bytes, void* value) {
  Core& core = current_core();
  core.issue(kScalar, "LocalTensor::GetValue");
  const UbSpan span = local_element(core, tensor, index, element_bytes);
  if (!core.ub.holds_element(span, core.limits())) {
    core.check_read(span);
  }
  core.mark_read(span);
  copy_element(value, core.ub.at(span.address), element_bytes);
  core.counters.scalar_ub_accesses += 1;
}

void store_local(const UbTensor& tensor, uint64_t index, uint64_t element_bytes, const void* value) {
  Core& core = current_core();
  core.issue(kScalar, "LocalTensor::SetValue");
  const UbSpan span = local_element(core, tensor, index, element_bytes);
  core.check_write(span);
  core.mark_written(span);
  copy_element(core.ub.at(span.address), value, element_bytes);
  core.counters.scalar_ub_accesses += 1;
}

void clean_cache_line(const GmTensor& tensor) {
  Core& core = current_core();
  core.issue(kScalar, "DataCacheCleanAndInvalid");
  core.gm().peek(core, tensor.address, 1);
  core.data_cache.clean(tensor.address / kCacheLine, tensor.address % kCacheLine);
}

void clean_cache() {
  Core& core = current_core();
  core.issue(kScalar, "DataCacheCleanAndInvalid");
  core.data_cache.clear();
}

void set_flag(int event, int32_t id) { current_core().set_flag(event, id); }
void wait_flag(int event, int32_t id) { current_core().wait_flag(event, id); }
void barrier(Engine engine) { current_core().barrier(engine); }
void barrier_all() { current_core().barrier_all(); }

int64_t block_index() { return current_core().index; }
int64_t block_count() { return current_core().blocks; }

void sync_all(const char* name) {
  Core& core = current_core();
  core.issue(kScalar, name);
  if (core.blocks > soc().vector_cores) {
    core.fail(text("%ld blocks wait for each other, but %s runs %ld at a time",
                   static_cast<long>(core.blocks), soc().name, static_cast<long>(soc().vector_cores)));
  }
  if (core.data_cache.any_dirty()) {
    core.fail(
        text("%ld lines written by SetValue are still in the data cache, where other cores cannot see them: "
             "DataCacheCleanAndInvalid must come first",
             static_cast<long>(core.data_cache.dirty_lines())));
  }
  core.machine().sync_all(core);
}

void sync_all_soft(const GmTensor& workspace, const UbTensor& scratch, int32_t used_cores) {
  Core& core = current_core();
  core.issue(kScalar, "SyncAll (soft)");
  if (used_cores != 0 && used_cores != core.blocks) {
    core.fail(text("usedCores %d of %ld: the emulator has the form for all cores only", used_cores,
                   static_cast<long>(core.blocks)));
  }
  const uint64_t bytes = static_cast<uint64_t>(core.blocks) * kUbBlock;
  aligned_operand(core, scratch, bytes, "the local workspace");
  if (workspace.bytes < bytes) {
    core.fail(text("the global workspace has %lu bytes, %ld cores need %lu", workspace.bytes,
                   static_cast<long>(core.blocks), bytes));
  }
  const uint8_t* counts = core.gm().peek(core, workspace.address, bytes);
  core.machine().check_workspace(core, counts, bytes);
  core.barrier_all();
  sync_all("SyncAll (soft)");
}

void set_atomic(const char* name, const char* type, CombineFunction combine) {
  Core& core = current_core();
  core.issue(kScalar, name);
  core.atomic = {true, type, combine};
}

void set_atomic_none() {
  Core& core = current_core();
  core.issue(kScalar, "SetAtomicNone");
  core.atomic = {};
}

void set_control(uint64_t value) {
  Core& core = current_core();
  core.issue(kScalar, "set_ctrl");
  if (((value ^ core.control) & ~kControlBits) != 0) {
    core.fail(
        text("writes %#lx to the control register, which is %#lx: the emulator knows %s only, the others "
             "must stay as they are",
             value, core.control, kControlBits == kKeepsInfinity ? "bit 48" : "bits 48, 53 and 60"));
  }
  core.control = value;
}

uint64_t control() {
  Core& core = current_core();
  core.issue(kScalar, "get_ctrl");
  return core.control;
}

void set_mask_mode(bool counter) {
  Core& core = current_core();
  core.issue(kScalar, counter ? "SetMaskCount" : "SetMaskNorm");
  core.mask.counter = counter;
}

void set_mask(int64_t count) {
  Core& core = current_core();
  core.issue(kScalar, "SetVectorMask");
  if (!core.mask.counter) {
    core.fail("MaskMode::COUNTER, but the mask does not count: SetMaskCount must come before");
  }
  if (count < 0) {
    core.fail(text("len %ld", static_cast<long>(count)));
  }
  core.mask.count = count;
}

void reset_mask() {
  Core& core = current_core();
  core.issue(kScalar, "ResetMask");
  core.mask.count = VectorMask::kAll;
}

}  // namespace rec_sdk::emulator
