// The local memory of a core. It records the last accesses to each 32-byte block, and which bytes hold data.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "emulator/ascendc/engine/buffers.h"
#include "emulator/ascendc/engine/order.h"

namespace rec_sdk::emulator {

constexpr uint32_t kUbBytes = 256 * 1024;  // the size on the largest chip
constexpr uint32_t kUbBlocks = kUbBytes / kUbBlock;

struct UbSpan {
  uint32_t address;
  uint32_t bytes;  // at least 1

  uint32_t end() const { return address + bytes; }
  uint32_t first_block() const { return address / kUbBlock; }
  uint32_t end_block() const { return (end() + kUbBlock - 1) / kUbBlock; }
  bool overlaps(const UbSpan& other) const { return address < other.end() && other.address < end(); }
};

class UnifiedBuffer {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  uint8_t* at(uint32_t address) { return bytes_ + address; }

  // Drops all data when a core starts: only bytes that are written later than `start` hold data.
  void forget(Stamp start) { start_ = start; }
  // Drops all data and all recorded accesses, when the clock restarts.
  void forget_times();

  // may_read() and may_write() return whether an access to the span obeys the rules. A quick test decides
  // most accesses; otherwise the functions below check each block.
  bool may_read(UbSpan span, const Limits& limits) const {
    return was_written_at_once(span, limits) ||
           ((within(page_writes_, span, limits) || unordered_write(span, limits) == kNone) &&
            first_unwritten(span) == kNone);
  }
  // Returns whether a quick test shows that an element may be read. The scalar unit reads many single
  // elements.
  bool holds_element(UbSpan span, const Limits& limits) const {
    const Block& block = blocks_[span.first_block()];
    const uint64_t bytes = ((uint64_t{1} << span.bytes) - 1) << span.address % kUbBlock;
    return (bytes & ~uint64_t{block.valid}) == 0 && block.write > start_ && limits.covers(block.write);
  }
  bool may_write(UbSpan span, const Limits& limits) const {
    return (within(page_reads_, span, limits) || unordered_read(span, limits) == kNone) &&
           (within(page_writes_, span, limits) || unordered_write(span, limits) == kNone);
  }

  // Return the first block of the span whose last write, or read, is not within the limits; kNone if there is
  // none.
  uint32_t unordered_write(UbSpan span, const Limits& limits) const;
  uint32_t unordered_read(UbSpan span, const Limits& limits) const;
  // Returns the first byte of the span that holds no data; kNone if there is none.
  uint32_t first_unwritten(UbSpan span) const;

  Stamp last_write(uint32_t block) const { return blocks_[block].write; }
  // Returns the stamp of a read of the block that is not within the limits, which must exist.
  Stamp read_beyond(uint32_t block, const Limits& limits) const;

  void mark_read(UbSpan span, Stamp stamp) {
    Stamp* read = read_[stamp_engine(stamp)] + span.first_block();
    Stamp* const end = read_[stamp_engine(stamp)] + span.end_block();
    do {
      *read = stamp;
    } while (++read != end);
    mark_pages(page_reads_, span, stamp);
  }
  void mark_written(UbSpan span, Stamp stamp) {
    const uint32_t first = span.first_block(), last = span.end_block() - 1;
    const uint32_t head = valid(first), tail = valid(last);
    std::fill(blocks_ + first, blocks_ + last + 1, Block{stamp, kWhole});
    blocks_[first].valid = head | mask_of(first, span);
    blocks_[last].valid = tail | mask_of(last, span);
    mark_pages(page_writes_, span, stamp);
  }
  void mark_unwritten(UbSpan span);
  // Records that a span was written, and that all of its bytes outside of `data` are undefined.
  void mark_undefined(UbSpan span, UbSpan data);

 private:
  static constexpr uint32_t kWhole = UINT32_MAX;

  struct Block {
    Stamp write;     // stamp of the latest write
    uint32_t valid;  // one bit per byte that holds data, if the write is by the running core
  };

  // Returns both members of a block as one integer, for comparisons.
  static uint64_t bits_of(const Block& block) {
    uint64_t bits;
    static_assert(sizeof(bits) == sizeof(block));
    std::memcpy(&bits, &block, sizeof(bits));
    return bits;
  }

  // The latest access of each engine to each page of 1 KiB. If all of these are within the limits, the blocks
  // of the page need not be checked.
  static constexpr uint32_t kPageBytes = 1024, kPages = kUbBytes / kPageBytes;

  static bool within(const Limits (&pages)[kPages], UbSpan span, const Limits& limits) {
    const Limits* page = pages + span.address / kPageBytes;
    const Limits* const last = pages + (span.end() - 1) / kPageBytes;
    bool all = limits.cover(*page);
    while (page != last) {
      all &= limits.cover(*++page);
    }
    return all;
  }
  static void mark_pages(Limits (&pages)[kPages], UbSpan span, Stamp stamp) {
    const int engine = stamp_engine(stamp);
    Limits* page = pages + span.address / kPageBytes;
    Limits* const last = pages + (span.end() - 1) / kPageBytes;
    page->by_engine[engine] = stamp;
    while (page != last) {
      (++page)->by_engine[engine] = stamp;
    }
  }

  // Returns the mask of the block's bytes that are in the span.
  static uint32_t mask_of(uint32_t block, UbSpan span) {
    const uint32_t start = block * kUbBlock;
    const uint32_t from = span.address > start ? span.address - start : 0;
    const uint32_t behind = span.end() < start + kUbBlock ? start + kUbBlock - span.end() : 0;
    return kWhole << from & kWhole >> behind;
  }
  uint32_t valid(uint32_t block) const { return blocks_[block].write > start_ ? blocks_[block].valid : 0; }

  // Returns whether every byte of the span holds data, and a single instruction of this core, within the
  // limits, was the last to write all of its blocks. All blocks but the last must hold data completely.
  bool was_written_at_once(UbSpan span, const Limits& limits) const {
    const uint32_t last = span.end_block() - 1;
    const Stamp write = blocks_[last].write;
    const uint64_t whole = bits_of({write, kWhole});
    uint64_t different = 0;
    for (const Block* block = blocks_ + span.first_block(); block < blocks_ + last; ++block) {
      different |= bits_of(*block) ^ whole;
    }
    const uint32_t missing = ~blocks_[last].valid & mask_of(last, span);
    return different == 0 && missing == 0 && write > start_ && limits.covers(write);
  }

  alignas(64) uint8_t bytes_[kUbBytes];
  alignas(64) Block blocks_[kUbBlocks];
  alignas(64) Stamp read_[kEngines][kUbBlocks];
  Limits page_writes_[kPages] = {}, page_reads_[kPages] = {};
  Stamp start_ = 0;
};

}  // namespace rec_sdk::emulator
