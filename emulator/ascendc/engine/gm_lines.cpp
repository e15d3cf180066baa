// The rules for accesses to the same line of global memory.
#include <string>

#include "emulator/ascendc/engine/gm.h"
#include "emulator/ascendc/engine/text.h"

namespace rec_sdk::emulator {

// The first byte of the mask, in the buffer.
uint64_t GlobalMemory::byte_of(const Range& range, uint64_t number, uint64_t mask) {
  return number * kCacheLine + static_cast<uint64_t>(__builtin_ctzll(mask)) - range.begin;
}

void GlobalMemory::conflict(Core& core, const Range& range, uint64_t number, uint64_t mask, Stamp other,
                            const char* did) const {
  core.fail(
      text("touches byte %lu of '%s', which another core %s (%s) in the same launch without a SyncAll in "
           "between",
           byte_of(range, number, mask), range.buffer.name, did, engine_name(stamp_engine(other))));
}

void GlobalMemory::unordered(Core& core, const Range& range, uint64_t number, uint64_t mask, Stamp other,
                             const char* did, const char* does) const {
  core.fail(text("%s byte %lu of '%s' that %s %s, and nothing orders the two: %s", does,
                 byte_of(range, number, mask), range.buffer.name, core.describe(other).c_str(), did,
                 Core::cure(stamp_engine(other), core.engine()).c_str()));
}

// Within a phase each core runs once and without a break. So what is not the running core's own in this phase
// is of cores that have run before it, and stays so until the phase ends: it can be added up.
GlobalMemory::Others& GlobalMemory::others_of(uint64_t number, GmLine& line) {
  if (line.others >= others_.size() || others_[line.others].number != number) {
    line.others = static_cast<uint32_t>(others_.size());
    others_.push_back({number, 0, 0, 0, 0, 0});
  }
  Others& others = others_[line.others];
  if (!in_phase(others.write) && !in_phase(others.read)) {
    others = {number, 0, 0, 0, 0, 0};
  }
  return others;
}

const GlobalMemory::Others* GlobalMemory::settle(uint64_t number, GmLine& line) {
  const bool own_write = own(line.write), own_read = own(line.read);
  const bool foreign_write = in_phase(line.write) && !own_write;
  const bool foreign_read = in_phase(line.read) && !own_read;
  const bool any = line.others < others_.size() && others_[line.others].number == number;
  Others* others = any || foreign_write || foreign_read ? &others_of(number, line) : nullptr;
  if (foreign_write) {
    others->written |= line.written;
    others->combined |= line.combined;
    others->write = line.write;
  }
  if (foreign_read) {
    others->was_read |= line.was_read;
    others->read = line.read;
  }
  if (!own_write) {
    line.written = line.combined = 0;
  }
  if (!own_read) {
    line.was_read = 0;
  }
  if (!own_write && !own_read) {
    line.older = 0;
  }
  return others;
}

void GlobalMemory::check_order(Core& core, const Range& range, uint64_t number, const GmLine& line,
                               uint64_t shared, bool writes, const char* does) const {
  if (shared == 0) {
    return;
  }
  const char* did = writes ? "writes" : "reads";
  for (uint32_t i = line.older; i != 0; i = older_[i - 1].next) {
    const Older& older = older_[i - 1];
    if (older.writes != writes || (older.mask & shared) == 0) {
      continue;
    }
    if (!core.limits().covers(older.stamp)) {
      unordered(core, range, number, older.mask & shared, older.stamp, did, does);
    }
    shared &= ~older.mask;
  }
  const Stamp latest = writes ? line.write : line.read;
  if (shared != 0 && !core.limits().covers(latest)) {
    unordered(core, range, number, shared, latest, did, does);
  }
}

void GlobalMemory::age(Stamp now, GmLine& line, uint64_t mask, bool writes) {
  const Stamp latest = writes ? line.write : line.read;
  if (!own(latest) || latest == now) {
    return;
  }
  uint64_t bytes = (writes ? line.written | line.combined : line.was_read) & ~mask;
  uint32_t unused = 0;
  for (uint32_t i = line.older; i != 0; i = older_[i - 1].next) {
    Older& older = older_[i - 1];
    if (older.writes == writes) {
      older.mask &= ~mask;
      bytes &= ~older.mask;
    }
    unused = older.mask == 0 ? i : unused;
  }
  if (bytes == 0) {
    return;
  }
  if (unused != 0) {
    older_[unused - 1] = {bytes, latest, writes, older_[unused - 1].next};
    return;
  }
  older_.push_back({bytes, latest, writes, line.older});
  line.older = static_cast<uint32_t>(older_.size());
}

void GlobalMemory::require_filled(Core& core, const Range& range, uint64_t number, const GmLine& line,
                                  uint64_t mask, const char* does) const {
  const uint64_t bytes = missing(range, line, mask);
  if (bytes != 0) {
    core.fail(text("%s byte %lu of '%s', an output that nothing has written yet", does,
                   byte_of(range, number, bytes), range.buffer.name));
  }
}

void GlobalMemory::touch_read(Core& core, Range& range, uint64_t number, GmLine& line, uint64_t mask) {
  if (const Others* others = settle(number, line)) {
    const uint64_t shared = (others->written | others->combined) & mask;
    if (shared != 0) {
      conflict(core, range, number, shared, others->write, "wrote");
    }
  }
  check_order(core, range, number, line, (line.written | line.combined) & mask, true, "reads");
  require_filled(core, range, number, line, mask, "reads");
  age(core.stamp(), line, mask, false);
  line.was_read |= mask;
  line.read = core.stamp();
}

void GlobalMemory::touch_write(Core& core, Range& range, uint64_t number, GmLine& line, uint64_t mask) {
  // Sums of several atomic copies need no order.
  const bool atomic = core.atomic.on && core.engine() == kMte3;
  const uint64_t counts = atomic ? 0 : UINT64_MAX;
  if (const Others* others = settle(number, line)) {
    const uint64_t written = (others->written | (others->combined & counts)) & mask;
    if (written != 0) {
      conflict(core, range, number, written, others->write, "wrote");
    }
    if ((others->was_read & mask) != 0) {
      conflict(core, range, number, others->was_read & mask, others->read, "read");
    }
  }
  check_order(core, range, number, line, (line.written | (line.combined & counts)) & mask, true, "writes");
  check_order(core, range, number, line, line.was_read & mask, false, "overwrites");
  if (atomic) {
    require_filled(core, range, number, line, mask, "combines with");
  }
  age(core.stamp(), line, mask, true);
  line.filled = filled(line) | mask;
  (atomic ? line.combined : line.written) |= mask;
  line.write = core.stamp();
}

void GlobalMemory::clean_before_copy(Core& core, const Range& range, uint64_t number) const {
  if (core.data_cache.any_dirty() && core.data_cache.dirty_bytes(number) != 0) {
    core.fail(
        text("copies the 64-byte line at byte %ld of '%s', which SetValue wrote to the data cache: "
             "DataCacheCleanAndInvalid must come first",
             static_cast<long>(number * kCacheLine - range.begin), range.buffer.name));
  }
}

void GlobalMemory::check_cached(Core& core, Range& range, uint64_t number, const GmLine& line,
                                uint64_t mask) {
  const Stamp since = core.data_cache.held_since(number, mask);
  const bool touched = !own(line.write) || ((line.written | line.combined) & mask) != 0;
  if (touched && line.write > since) {
    core.fail(
        text("accesses byte %lu of '%s' in the data cache, which has held its line since before a copy or "
             "another core wrote it: DataCacheCleanAndInvalid must come first",
             byte_of(range, number, mask), range.buffer.name));
  }
}

}  // namespace rec_sdk::emulator
