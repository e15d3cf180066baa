// The local memory of a core, with a record of the last access to each 32-byte block and of bytes that hold
// data.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "emulator/ascendc/engine/buffers.h"
#include "emulator/ascendc/engine/order.h"

namespace rec_sdk::emulator {

constexpr uint32_t kUbBytes = 256 * 1024;  // the largest of any chip
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

  // Forgets all data: a core starts, and all that is written from here on has a later stamp.
  void forget(Stamp start) { start_ = start; }
  // Forgets all accesses too, for when the clock starts again.
  void forget_times();

  // Whether a read or a write of the span breaks no rule. For most reads and writes that is seen at once;
  // where it is not, the functions below look at block after block.
  bool may_read(UbSpan span, const Limits& limits) const {
    return was_written_at_once(span, limits) ||
           ((within(page_writes_, span, limits) || unordered_write(span, limits) == kNone) &&
            first_unwritten(span) == kNone);
  }
  // Whether that is seen at once for an element, of which the scalar unit reads many.
  bool holds_element(UbSpan span, const Limits& limits) const {
    const Block& block = blocks_[span.first_block()];
    const uint64_t bytes = ((uint64_t{1} << span.bytes) - 1) << span.address % kUbBlock;
    return (bytes & ~uint64_t{block.valid}) == 0 && block.write > start_ && limits.covers(block.write);
  }
  bool may_write(UbSpan span, const Limits& limits) const {
    return (within(page_reads_, span, limits) || unordered_read(span, limits) == kNone) &&
           (within(page_writes_, span, limits) || unordered_write(span, limits) == kNone);
  }

  // The first block of the span whose last write (or a read of it) is not within the limits, or kNone.
  uint32_t unordered_write(UbSpan span, const Limits& limits) const;
  uint32_t unordered_read(UbSpan span, const Limits& limits) const;
  // The first byte of the span that was never written, or kNone.
  uint32_t first_unwritten(UbSpan span) const;

  Stamp last_write(uint32_t block) const { return blocks_[block].write; }
  // The stamp of a read of the block that is not within the limits.
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
  // A span was just written, and all of it but `data` may hold anything.
  void mark_undefined(UbSpan span, UbSpan data);

 private:
  static constexpr uint32_t kWhole = UINT32_MAX;

  struct Block {
    Stamp write;     // the last one
    uint32_t valid;  // a bit per byte that holds data, if that write is of the core that runs
  };

  // To compare both at once.
  static uint64_t bits_of(const Block& block) {
    uint64_t bits;
    static_assert(sizeof(bits) == sizeof(block));
    std::memcpy(&bits, &block, sizeof(bits));
    return bits;
  }

  // Pages of blocks know the latest access of each engine to any of theirs: where all these are within the
  // limits, no block needs a look.
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

  // The bits of a block's bytes that lie in the span.
  static uint32_t mask_of(uint32_t block, UbSpan span) {
    const uint32_t start = block * kUbBlock;
    const uint32_t from = span.address > start ? span.address - start : 0;
    const uint32_t behind = span.end() < start + kUbBlock ? start + kUbBlock - span.end() : 0;
    return kWhole << from & kWhole >> behind;
  }
  uint32_t valid(uint32_t block) const { return blocks_[block].write > start_ ? blocks_[block].valid : 0; }

  // Whether one instruction of this core, within the limits, wrote all blocks of the span last, and every
  // byte of it holds data. It looks at all bytes of the blocks before the last one.
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
