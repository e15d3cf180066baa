// Global memory during a launch: the buffers that the launch may access, and which core accessed each 64-byte
// line of the writable buffers. It is an error if two cores access the same bytes between two SyncAll and one
// of them writes. It is also an error if nothing orders two accesses of one core to the same bytes, one of
// which is a write.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emulator/ascendc/engine/core.h"
#include "emulator/ascendc/launch.h"

namespace rec_sdk::emulator {

// The state of a line of 64 bytes. A mask has one bit per byte. The masks are valid for the core whose access
// is stamped in `write` or `read`.
struct GmLine {
  uint64_t number;    // address / 64
  Stamp write, read;  // latest accesses of any core
  uint64_t written;   // bytes written by plain copies and stores
  uint64_t combined;  // bytes written by atomic copies
  uint64_t was_read;
  uint64_t filled;  // bytes that any core wrote in this launch, if `write` is a stamp of this launch
  uint32_t others;  // index in others_, if the entry there has the number of this line
  uint32_t older;   // 1 + index in older_ of the core's accesses before the latest one; 0 if there are none
};

// The compact state of a line that was accessed only by plain copies of the whole line, of one core per
// phase. This is the case for nearly all lines of long rows. For any other line, `read` is kLong and `write`
// is the index of its GmLine in GlobalMemory::lines_.
struct GmRecord {
  static constexpr Stamp kLong = -1;
  Stamp write, read;
};

// Returns the mask of bytes [from, to) of a line.
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
  // Returns the name of an output with unwritten bytes and the position of the first one; an empty string if
  // the launch has written all outputs.
  std::string unwritten_output() const;
  // Begins a phase, at the start of a launch or after a SyncAll. Accesses before `time` are complete for
  // every core.
  void begin_phase(int32_t time) { phase_ = limit_of(time); }
  // Begins a segment: a period in which only one core runs.
  void begin_segment(int32_t time) {
    segment_ = limit_of(time);
    older_.clear();
  }
  // Must be called when the clock restarts: drops all stamps.
  void forget_times();

  // Check and record copies by the core's current instruction. They return the host address of the bytes.
  const uint8_t* copy_in(Core& core, uint64_t address, uint64_t bytes);
  uint8_t* copy_out(Core& core, uint64_t address, uint64_t bytes);
  // Check and record accesses of the scalar unit through its data cache. They return the host address of the
  // bytes.
  const uint8_t* load(Core& core, uint64_t address, uint64_t bytes);
  uint8_t* store(Core& core, uint64_t address, uint64_t bytes);
  // Returns the host address of the bytes without recording an access, for checks.
  const uint8_t* peek(Core& core, uint64_t address, uint64_t bytes) {
    return resolve(core, address, bytes).first;
  }

 private:
  struct Range {
    Buffer buffer;
    uint64_t begin, end, first_line;
    std::vector<GmChunk*> chunks;  // null for lines that this launch has not accessed
  };
  // The accesses to a line by cores that ran earlier in this phase.
  struct Others {
    uint64_t number;
    Stamp write, read;  // the latest accesses
    uint64_t written;
    uint64_t combined;
    uint64_t was_read;
  };

  // Older accesses of the running core to bytes of a line, which its latest access did not touch. Bytes of a
  // line, such as rows of two tiles, are ordered independently.
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
  // Returns the full state of a line. The line then has a full state until the launch ends.
  GmLine& line(uint64_t number, GmRecord& record);
  void prefetch(Range& range, uint64_t address, uint64_t bytes, const uint8_t* host);
  // Returns whether the compact record alone shows that a copy of the whole line is allowed, and records the
  // access in this case.
  bool whole_read(const Core& core, const Range& range, GmRecord& record) const;
  bool whole_write(const Core& core, GmRecord& record) const;
  template <class F>
  void for_each_line(Range& range, uint64_t address, uint64_t bytes, F&& f);

  void touch_read(Core& core, const Range& range, uint64_t number, GmLine& line, uint64_t mask);
  void touch_write(Core& core, const Range& range, uint64_t number, GmLine& line, uint64_t mask);
  // Moves accesses of other cores in this phase from the line to its Others, and returns the Others; null if
  // there are no such accesses.
  const Others* settle(uint64_t number, GmLine& line);
  Others& others_of(uint64_t number, GmLine& line);
  // Checks, before an access of the core, that it is ordered after the core's own accesses to the bytes
  // `shared`.
  void check_order(Core& core, const Range& range, uint64_t number, const GmLine& line, uint64_t shared,
                   bool writes, const char* does) const;
  void check_order_of_all(Core& core, const Range& range, uint64_t number, const GmLine& line,
                          uint64_t shared, bool writes, const char* does) const;
  // Must be called before an access to the bytes `mask` becomes the line's latest access: keeps the former
  // one in `older_` if necessary.
  void age(Stamp now, GmLine& line, uint64_t mask, bool writes);
  void keep_older(Stamp latest, GmLine& line, uint64_t mask, bool writes);
  void clean_before_copy(Core& core, const Range& range, uint64_t number) const;
  void check_cached(Core& core, Range& range, uint64_t number, const GmLine& line, uint64_t mask);

  uint64_t filled(const GmLine& line) const { return line.write > launch_ ? line.filled : 0; }
  uint64_t filled(uint64_t number, const GmRecord& record) const;
  // Returns the bytes of `mask` that belong to an output and are not written yet.
  uint64_t missing(const Range& range, const GmLine& line, uint64_t mask) const {
    return range.buffer.access == Access::kWrite ? mask & ~filled(line) : 0;
  }
  // Returns whether the line has a full state in this launch.
  bool is_long(uint64_t number, const GmRecord& record) const {
    return record.read == GmRecord::kLong && static_cast<uint32_t>(record.write) < lines_.size() &&
           lines_[static_cast<uint32_t>(record.write)].number == number;
  }
  void require_filled(Core& core, const Range& range, uint64_t number, const GmLine& line, uint64_t mask,
                      const char* does) const;
  // Returns the position of the first byte of an output that is not written yet; UINT64_MAX if there is none.
  uint64_t first_missing(const Range& range) const;
  static uint64_t byte_of(const Range& range, uint64_t number, uint64_t mask);

  bool in_phase(Stamp stamp) const { return stamp > phase_; }
  // Returns whether no core has accessed the line since the phase began.
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
