// The local memory of a core, with a record of the last access to each 32-byte block and of bytes that hold
// data.
#pragma once

#include <cstdint>

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

  // Forgets all data, at the start of a core.
  void forget();
  // Forgets all accesses too, for when the clock starts again.
  void forget_times();

  // The first block of the span whose last write (or a read of it) is not within the limits, or kNone.
  uint32_t unordered_write(UbSpan span, const Limits& limits) const;
  uint32_t unordered_read(UbSpan span, const Limits& limits) const;
  // The first byte of the span that was never written, or kNone.
  uint32_t first_unwritten(UbSpan span) const;

  Stamp last_write(uint32_t block) const { return write_[block]; }
  // The stamp of a read of the block that is not within the limits.
  Stamp read_beyond(uint32_t block, const Limits& limits) const;

  void mark_read(UbSpan span, Stamp stamp);
  void mark_written(UbSpan span, Stamp stamp);
  void mark_unwritten(UbSpan span);
  // A span was just written, and all of it but `data` may hold anything.
  void mark_undefined(UbSpan span, UbSpan data);

 private:
  alignas(64) uint8_t bytes_[kUbBytes];
  alignas(64) Stamp write_[kUbBlocks];
  alignas(64) Stamp read_[kEngines][kUbBlocks];
  alignas(64) uint32_t valid_[kUbBlocks];  // a bit per byte
  uint32_t used_blocks_ = 0;               // no block from here on has valid bytes
};

}  // namespace rec_sdk::emulator
