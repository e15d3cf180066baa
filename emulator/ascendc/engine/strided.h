// An operand of a vector instruction: values side by side, or blocks of 32 bytes at strides.
#pragma once

#include <algorithm>

#include "emulator/ascendc/engine/instructions.h"
#include "emulator/ascendc/engine/operands.h"

namespace rec_sdk::emulator {

class Operand {
 public:
  Operand() = default;
  // The first `count` elements, at least 1. `name`: for messages.
  Operand(Core& core, const UbTensor& tensor, int64_t count, uint32_t element_bytes, const Strides& strides,
          const char* name)
      : strides_(strides), bytes_(static_cast<uint64_t>(count) * element_bytes) {
    uint64_t extent = bytes_;
    if (!strides.side_by_side()) {
      extent = 0;
      for (int64_t i = 0; i < blocks(); ++i) extent = std::max(extent, offset(i) + bytes_of(i));
    }
    whole_ = aligned_operand(core, tensor, extent, name);
  }

  const UbSpan& whole() const { return whole_; }
  const Strides& strides() const { return strides_; }
  bool same_places(const Operand& other) const {
    return whole_.address == other.whole_.address && bytes_ == other.bytes_ &&
           strides_.block == other.strides_.block && strides_.repeat == other.strides_.repeat;
  }
  // Calls f with each span of bytes that are values.
  template <class F>
  void each(const F& f) const {
    if (strides_.side_by_side()) return f(whole_);
    for (int64_t i = 0; i < blocks(); ++i) f(block(i));
  }
  int64_t blocks() const { return static_cast<int64_t>((bytes_ + kUbBlock - 1) / kUbBlock); }
  UbSpan block(int64_t i) const {
    return {whole_.address + static_cast<uint32_t>(offset(i)), static_cast<uint32_t>(bytes_of(i))};
  }

  // That its blocks take to be read or written: those of a repeat at once, but for those of one bank group,
  // of which there are 16, block by block in turn. Source: asc-devkit, structure of the Unified Buffer of
  // 2201.
  int64_t cycles() const {
    constexpr uint64_t kBankGroups = 16;
    if (strides_.side_by_side()) return 0;
    int64_t cycles = 0;
    for (int64_t first = 0; first < blocks(); first += kBlocksOfRepeat) {
      int64_t of_group[kBankGroups] = {}, most = 0;
      for (int64_t i = first; i < std::min(blocks(), first + kBlocksOfRepeat); ++i) {
        most = std::max(most, ++of_group[block(i).address / kUbBlock % kBankGroups]);
      }
      cycles += most;
    }
    return cycles;
  }

 private:
  static constexpr int64_t kBlocksOfRepeat = 8;

  uint64_t offset(int64_t i) const {
    return static_cast<uint64_t>(i / kBlocksOfRepeat * strides_.repeat +
                                 i % kBlocksOfRepeat * strides_.block) *
           kUbBlock;
  }
  uint64_t bytes_of(int64_t i) const {
    return std::min<uint64_t>(kUbBlock, bytes_ - static_cast<uint64_t>(i) * kUbBlock);
  }

  Strides strides_;
  uint64_t bytes_ = 0;
  UbSpan whole_{};
};

}  // namespace rec_sdk::emulator
