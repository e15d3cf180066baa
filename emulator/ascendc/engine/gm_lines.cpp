// The rules for accesses to global memory, line by line.
#include <string>

#include "emulator/ascendc/engine/gm.h"
#include "emulator/ascendc/engine/text.h"

namespace rec_sdk::emulator {

// Returns the position of the first byte of `mask` in the buffer.
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

// Returns the Others of a line; adds an entry if there is none. Within a phase, each core runs once and
// without interruption. All accesses of other cores in this phase are therefore by cores that have already
// run, and can be accumulated.
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

inline const GlobalMemory::Others* GlobalMemory::settle(uint64_t number, GmLine& line) {
  if (untouched(line)) {
    line.written = line.combined = line.was_read = 0;
    line.older = 0;
    return nullptr;
  }
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

inline void GlobalMemory::check_order(Core& core, const Range& range, uint64_t number, const GmLine& line,
                                      uint64_t shared, bool writes, const char* does) const {
  const bool latest_alone = line.older == 0 && core.limits().covers(writes ? line.write : line.read);
  if (shared != 0 && !latest_alone) {
    check_order_of_all(core, range, number, line, shared, writes, does);
  }
}

void GlobalMemory::check_order_of_all(Core& core, const Range& range, uint64_t number, const GmLine& line,
                                      uint64_t shared, bool writes, const char* does) const {
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

inline void GlobalMemory::age(Stamp now, GmLine& line, uint64_t mask, bool writes) {
  const Stamp latest = writes ? line.write : line.read;
  if (own(latest) && latest != now) {
    keep_older(latest, line, mask, writes);
  }
}

void GlobalMemory::keep_older(Stamp latest, GmLine& line, uint64_t mask, bool writes) {
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

inline void GlobalMemory::require_filled(Core& core, const Range& range, uint64_t number, const GmLine& line,
                                         uint64_t mask, const char* does) const {
  const uint64_t bytes = missing(range, line, mask);
  if (bytes != 0) {
    core.fail(text("%s byte %lu of '%s', an output that nothing has written yet", does,
                   byte_of(range, number, bytes), range.buffer.name));
  }
}

inline void GlobalMemory::touch_read(Core& core, const Range& range, uint64_t number, GmLine& line,
                                     uint64_t mask) {
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

inline void GlobalMemory::touch_write(Core& core, const Range& range, uint64_t number, GmLine& line,
                                      uint64_t mask) {
  // Atomic copies need no order after other atomic copies.
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

inline void GlobalMemory::clean_before_copy(Core& core, const Range& range, uint64_t number) const {
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

GmLine& GlobalMemory::line(uint64_t number, GmRecord& record) {
  if (!is_long(number, record)) {
    const bool of_launch = record.read != GmRecord::kLong;
    const Stamp write = of_launch ? record.write : 0, read = of_launch ? record.read : 0;
    const auto whole_if = [](bool condition) { return condition ? UINT64_MAX : 0; };
    record = {static_cast<Stamp>(lines_.size()), GmRecord::kLong};
    lines_.push_back({number, write, read, whole_if(in_phase(write)), 0, whole_if(in_phase(read)),
                      whole_if(write > launch_), 0, 0});
  }
  return lines_[static_cast<uint32_t>(record.write)];
}

inline bool GlobalMemory::whole_read(const Core& core, const Range& range, GmRecord& record) const {
  const bool ordered = !in_phase(record.write) || (own(record.write) && core.limits().covers(record.write));
  const bool alone = !in_phase(record.read) || own(record.read);
  const bool has_data = range.buffer.access != Access::kWrite || record.write > launch_;
  const bool passes = record.read != GmRecord::kLong && ordered && alone && has_data;
  if (passes) record.read = core.stamp();
  return passes;
}

inline bool GlobalMemory::whole_write(const Core& core, GmRecord& record) const {
  const auto after = [&](Stamp stamp) {
    return !in_phase(stamp) || (own(stamp) && core.limits().covers(stamp));
  };
  const bool passes =
      record.read != GmRecord::kLong && !core.atomic.on && after(record.write) && after(record.read);
  if (passes) record.write = core.stamp();
  return passes;
}

template <class F>
void GlobalMemory::for_each_line(Range& range, uint64_t address, uint64_t bytes, F&& f) {
  const uint64_t end = address + bytes;
  GmRecord* record = nullptr;
  for (uint64_t number = address / kCacheLine; number * kCacheLine < end; ++number) {
    const uint64_t start = number * kCacheLine;
    const uint64_t from = address > start ? address - start : 0;
    const uint64_t to = end - start < kCacheLine ? end - start : kCacheLine;
    const bool chunk_begins = (number - range.first_line) % kChunkLines == 0;
    record = record == nullptr || chunk_begins ? &this->record(range, number) : record + 1;
    f(number, *record, mask_between(from, to));
  }
}

const uint8_t* GlobalMemory::copy_in(Core& core, uint64_t address, uint64_t bytes) {
  const auto [host, range] = resolve(core, address, bytes);
  if (range->buffer.access != Access::kRead) {
    prefetch(*range, address, bytes, host);
    for_each_line(*range, address, bytes, [&, r = range](uint64_t number, GmRecord& record, uint64_t mask) {
      clean_before_copy(core, *r, number);
      if (mask != UINT64_MAX || !whole_read(core, *r, record)) {
        touch_read(core, *r, number, line(number, record), mask);
      }
    });
  }
  return host;
}

uint8_t* GlobalMemory::copy_out(Core& core, uint64_t address, uint64_t bytes) {
  Range* range;
  uint8_t* host = writable(core, address, bytes, range);
  prefetch(*range, address, bytes, host);
  for_each_line(*range, address, bytes, [&](uint64_t number, GmRecord& record, uint64_t mask) {
    clean_before_copy(core, *range, number);
    if (mask != UINT64_MAX || !whole_write(core, record)) {
      touch_write(core, *range, number, line(number, record), mask);
    }
  });
  return host;
}

const uint8_t* GlobalMemory::load(Core& core, uint64_t address, uint64_t bytes) {
  const auto [host, range] = resolve(core, address, bytes);
  if (range->buffer.access != Access::kRead) {
    for_each_line(*range, address, bytes, [&, r = range](uint64_t number, GmRecord& record, uint64_t mask) {
      GmLine& state = line(number, record);
      check_cached(core, *r, number, state, mask);
      touch_read(core, *r, number, state, mask);
      core.data_cache.load(number, core.stamp());
    });
  }
  return host;
}

uint8_t* GlobalMemory::store(Core& core, uint64_t address, uint64_t bytes) {
  Range* range;
  uint8_t* host = writable(core, address, bytes, range);
  for_each_line(*range, address, bytes, [&](uint64_t number, GmRecord& record, uint64_t mask) {
    GmLine& state = line(number, record);
    const Others* others = settle(number, state);
    if (others != nullptr && (others->written | others->combined) != 0) {
      core.fail(
          text("writes byte %lu of '%s' through the data cache, in a 64-byte line that another core "
               "writes too: lines must not be shared between cores",
               address - range->begin, range->buffer.name));
    }
    check_cached(core, *range, number, state, UINT64_MAX);
    touch_write(core, *range, number, state, mask);
    core.data_cache.store(number, mask, core.stamp());
  });
  return host;
}

}  // namespace rec_sdk::emulator
