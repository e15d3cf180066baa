// The data cache of a core's scalar unit: which 64-byte lines of global memory it contains, when they were
// loaded, and which of their bytes were written.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "emulator/ascendc/engine/order.h"

namespace rec_sdk::emulator {

constexpr uint64_t kCacheLine = 64;

class DataCache {
 public:
  void clear() {
    if (!lines_.empty()) {
      lines_.clear();
    }
    dirty_lines_ = 0;
  }
  // Returns the stamp since when the line's bytes in `mask` are cached; INT32_MAX if they are not cached.
  Stamp held_since(uint64_t line, uint64_t mask) const {
    const auto found = lines_.find(line);
    return found == lines_.end() || (found->second.held & mask) == 0 ? INT32_MAX : found->second.since;
  }
  void load(uint64_t line, Stamp now) {
    Line& held = lines_[line];
    if (held.held != UINT64_MAX) {
      held.since = now;
      held.held = UINT64_MAX;
    }
  }
  void store(uint64_t line, uint64_t mask, Stamp now) {
    Line& held = lines_[line];
    dirty_lines_ += held.dirty == 0 ? 1 : 0;
    held = {now, UINT64_MAX, held.dirty | mask};
  }
  // Writes back and drops the bytes of a line from byte `from` to its end, as the hardware does.
  void clean(uint64_t line, uint64_t from) {
    const auto found = lines_.find(line);
    if (found == lines_.end()) {
      return;
    }
    const uint64_t kept = (uint64_t{1} << from) - 1;
    const bool was_dirty = found->second.dirty != 0;
    found->second.held &= kept;
    found->second.dirty &= kept;
    dirty_lines_ -= was_dirty && found->second.dirty == 0 ? 1 : 0;
    if (found->second.held == 0) {
      lines_.erase(found);
    }
  }
  bool any_dirty() const { return dirty_lines_ != 0; }
  uint64_t dirty_bytes(uint64_t line) const {
    const auto found = lines_.find(line);
    return found == lines_.end() ? 0 : found->second.dirty;
  }
  int64_t dirty_lines() const { return dirty_lines_; }

 private:
  struct Line {
    Stamp since = 0;
    uint64_t held = 0;   // cached bytes, one bit each
    uint64_t dirty = 0;  // bytes that are not written back yet
  };

  std::unordered_map<uint64_t, Line> lines_;  // indexed by address / 64
  int64_t dirty_lines_ = 0;
};

}  // namespace rec_sdk::emulator
