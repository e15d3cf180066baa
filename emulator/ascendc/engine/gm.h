// Global memory as a launch sees it: the buffers it was given, and which core touched each 64-byte line of
// those that it may write. Two cores that touch the same bytes between two SyncAll, a write among them, are
// an error, and so are two accesses of one core that nothing orders.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emulator/ascendc/engine/core.h"
#include "emulator/ascendc/launch.h"

namespace rec_sdk::emulator {

// The state of one line of 64 bytes. A mask has a bit per byte. The masks are of the core that runs, if
// the stamp is of it.
struct GmLine {
  uint64_t number;    // its address / 64
  Stamp write, read;  // the latest of any core
  uint64_t written;   // by plain copies and stores
  uint64_t combined;  // by atomic copies
  uint64_t was_read;
  uint64_t filled;  // written by any core in this launch, if `write` is of it
  uint32_t others;  // index of what earlier cores of this phase did, if its line is this one
  uint32_t older;   // index, from 1, of the first of the core's accesses before the latest; 0: none
};

// The same in short, for a line of which plain copies of one core in each phase have touched all bytes at
// once: nearly all lines of long rows. `read` is kLong and `write` an index into GlobalMemory::lines_ for
// others.
struct GmRecord {
  static constexpr Stamp kLong = -1;
  Stamp write, read;
};

// Bytes [from, to) of a line, as a mask.
inline uint64_t mask_between(uint64_t from, uint64_t to) {
  const uint64_t below_to = to == kCacheLine ? UINT64_MAX : (uint64_t{1} << to) - 1;
  return below_to & ~((uint64_t{1} << from) - 1);
}

constexpr uint64_t kChunkLines = 2048;
using GmChunk = GmRecord[kChunkLines];

class GlobalMemory {
 public:
  void begin_launch(const std::vector<Buffer>& buffers, int32_t time);
  void end_launch();
  // Names the first byte of an output that this launch has not written; "" when all are.
  std::string unwritten_output() const;
  // From here on the accesses before `time` are in the past for every core: a launch starts, or a SyncAll
  // ended.
  void begin_phase(int32_t time) { phase_ = limit_of(time); }
  // From here on one core runs, until the next call.
  void begin_segment(int32_t time) {
    segment_ = limit_of(time);
    older_.clear();
  }
  // The clock starts again.
  void forget_times();

  // Copies of the core's current instruction. They return where the bytes are on the host.
  const uint8_t* copy_in(Core& core, uint64_t address, uint64_t bytes);
  uint8_t* copy_out(Core& core, uint64_t address, uint64_t bytes);
  // The scalar unit, through its cache.
  const uint8_t* load(Core& core, uint64_t address, uint64_t bytes);
  uint8_t* store(Core& core, uint64_t address, uint64_t bytes);
  // The bytes without an access: for checks.
  const uint8_t* peek(Core& core, uint64_t address, uint64_t bytes) {
    return resolve(core, address, bytes).first;
  }

 private:
  struct Range {
    Buffer buffer;
    uint64_t begin, end, first_line;
    std::vector<GmChunk*> chunks;  // null: never touched in this launch
  };
  // Accesses to a line by cores that ran earlier in this phase.
  struct Others {
    uint64_t number;
    Stamp write, read;  // the latest
    uint64_t written;
    uint64_t combined;
    uint64_t was_read;
  };

  // Accesses to bytes of a line that the latest access to it did not touch: neighbours in the line, such as
  // the rows of two tiles, are ordered independently.
  struct Older {
    uint64_t mask;
    Stamp stamp;
    bool writes;
    uint32_t next;
  };

  std::pair<uint8_t*, Range*> resolve(Core& core, uint64_t address, uint64_t bytes);
  [[noreturn]] void out_of_bounds(Core& core, uint64_t address, uint64_t bytes) const;
  uint8_t* writable(Core& core, uint64_t address, uint64_t bytes, Range*& range);
  GmRecord& record(Range& range, uint64_t number);
  // The state of a line at length, which it keeps until the launch ends.
  GmLine& line(uint64_t number, GmRecord& record);
  void prefetch(Range& range, uint64_t address, uint64_t bytes, const uint8_t* host);
  // Whether a copy of the whole line breaks no rule, as the record alone shows; it is then marked.
  bool whole_read(const Core& core, const Range& range, GmRecord& record) const;
  bool whole_write(const Core& core, GmRecord& record) const;
  template <class F>
  void for_each_line(Range& range, uint64_t address, uint64_t bytes, F&& f);

  void touch_read(Core& core, const Range& range, uint64_t number, GmLine& line, uint64_t mask);
  void touch_write(Core& core, const Range& range, uint64_t number, GmLine& line, uint64_t mask);
  // Moves what another core left in the line to its Others, which are returned: null when there are none.
  const Others* settle(uint64_t number, GmLine& line);
  Others& others_of(uint64_t number, GmLine& line);
  // Before an access of the core: the order after its own accesses to the bytes `shared`.
  void check_order(Core& core, const Range& range, uint64_t number, const GmLine& line, uint64_t shared,
                   bool writes, const char* does) const;
  void check_order_of_all(Core& core, const Range& range, uint64_t number, const GmLine& line,
                          uint64_t shared, bool writes, const char* does) const;
  // Before an access to the bytes `mask` becomes the line's latest.
  void age(Stamp now, GmLine& line, uint64_t mask, bool writes);
  void keep_older(Stamp latest, GmLine& line, uint64_t mask, bool writes);
  void clean_before_copy(Core& core, const Range& range, uint64_t number) const;
  void check_cached(Core& core, Range& range, uint64_t number, const GmLine& line, uint64_t mask);

  uint64_t filled(const GmLine& line) const { return line.write > launch_ ? line.filled : 0; }
  uint64_t filled(uint64_t number, const GmRecord& record) const;
  // The bytes among these that are of an output and hold no result yet.
  uint64_t missing(const Range& range, const GmLine& line, uint64_t mask) const {
    return range.buffer.access == Access::kWrite ? mask & ~filled(line) : 0;
  }
  // Whether the record has a line of this launch.
  bool is_long(uint64_t number, const GmRecord& record) const {
    return record.read == GmRecord::kLong && static_cast<uint32_t>(record.write) < lines_.size() &&
           lines_[static_cast<uint32_t>(record.write)].number == number;
  }
  void require_filled(Core& core, const Range& range, uint64_t number, const GmLine& line, uint64_t mask,
                      const char* does) const;
  // The first byte of the range that is `missing`, or UINT64_MAX.
  uint64_t first_missing(const Range& range) const;
  static uint64_t byte_of(const Range& range, uint64_t number, uint64_t mask);

  bool in_phase(Stamp stamp) const { return stamp > phase_; }
  // Whether no core touched the line since the phase began.
  bool untouched(const GmLine& line) const { return !in_phase(line.write) && !in_phase(line.read); }
  bool own(Stamp stamp) const { return stamp > segment_; }
  [[noreturn]] void conflict(Core& core, const Range& range, uint64_t number, uint64_t mask, Stamp other,
                             const char* did) const;
  [[noreturn]] void unordered(Core& core, const Range& range, uint64_t number, uint64_t mask, Stamp other,
                              const char* did, const char* does) const;

  std::vector<Range> ranges_;
  Range* latest_ = nullptr;
  std::vector<GmLine> lines_;
  std::vector<Others> others_;
  std::vector<Older> older_;
  std::vector<std::unique_ptr<GmChunk>> chunks_;
  size_t used_chunks_ = 0;
  Stamp launch_ = 0, phase_ = 0, segment_ = 0;
};

}  // namespace rec_sdk::emulator
