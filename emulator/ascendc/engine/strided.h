// An operand of a vector instruction: consecutive values, or blocks of 32 bytes with strides.
#pragma once

#include <algorithm>
#include <numeric>

#include "emulator/ascendc/engine/instructions.h"
#include "emulator/ascendc/engine/operands.h"

namespace rec_sdk::emulator {

class Operand {
 public:
  Operand() = default;
  // Creates the operand from the first `count` elements of a tensor, at least 1, and checks it. `name` is
  // used in messages.
  Operand(Core& core, const UbTensor& tensor, int64_t count, uint32_t element_bytes, const Strides& strides,
          const char* name)
      : strides_(strides), bytes_(static_cast<uint64_t>(count) * element_bytes) {
    whole_ = aligned_operand(core, tensor, strides.side_by_side() ? bytes_ : extent(), name);
  }

  bool exists() const { return bytes_ != 0; }
  const UbSpan& whole() const { return whole_; }
  // Returns the size of all values in bytes.
  uint64_t bytes() const { return bytes_; }
  const Strides& strides() const { return strides_; }
  bool same_places(const Operand& other) const {
    return whole_.address == other.whole_.address && bytes_ == other.bytes_ &&
           strides_.block == other.strides_.block && strides_.repeat == other.strides_.repeat;
  }
  // Calls f with each span of consecutive bytes of values. Depending on the strides, a span is the whole
  // operand, a repeat or a block.
  template <class F>
  void each(const F& f) const {
    if (!exists()) return;
    if (strides_.side_by_side()) return f(whole_);
    const uint64_t run = run_bytes();
    for (uint64_t begin = 0; begin < bytes_; begin += run) f(part(begin, run));
  }
  // Calls f with each span that an error message names: the whole operand if its values are consecutive,
  // otherwise each block.
  template <class F>
  void each_block(const F& f) const {
    if (strides_.side_by_side()) return f(whole_);
    for (uint64_t begin = 0; begin < bytes_; begin += kUbBlock) f(part(begin, kUbBlock));
  }
  // Returns the size in bytes of a run of consecutive values.
  uint64_t run_bytes() const {
    if (!exists()) return UINT64_MAX;
    return strides_.side_by_side() ? bytes_ : strides_.block == 1 ? kRepeatBytes : uint64_t{kUbBlock};
  }
  // Returns the span of up to `bytes` bytes of values from byte `begin` on. It must lie within a consecutive
  // run.
  UbSpan part(uint64_t begin, uint64_t bytes) const {
    return {whole_.address + static_cast<uint32_t>(place(begin)),
            static_cast<uint32_t>(std::min(bytes, bytes_ - begin))};
  }

  // Returns the number of cycles to read or write the blocks of the operand. All blocks of a repeat are
  // accessed in one cycle, except that blocks in the same bank group, out of 16, need one cycle each. Source:
  // asc-devkit, structure of the Unified Buffer of 2201.
  int64_t cycles() const {
    constexpr int64_t kBankGroups = 16;
    if (strides_.side_by_side()) return 0;
    const int64_t met =
        kBankGroups /
        std::gcd(kBankGroups, int64_t{strides_.block});  // number of bank groups that the blocks use
    const auto of_repeat = [&](int64_t blocks) { return (blocks + met - 1) / met; };
    const auto blocks = static_cast<int64_t>((bytes_ + kUbBlock - 1) / kUbBlock);
    return blocks / kBlocksOfRepeat * of_repeat(kBlocksOfRepeat) + of_repeat(blocks % kBlocksOfRepeat);
  }

 private:
  static constexpr int64_t kBlocksOfRepeat = 8;
  static constexpr uint64_t kRepeatBytes = kBlocksOfRepeat * kUbBlock;

  // Returns the offset of byte `byte` of the values from the operand's address.
  uint64_t place(uint64_t byte) const {
    return (byte / kRepeatBytes * strides_.repeat + byte % kRepeatBytes / kUbBlock * strides_.block) *
               kUbBlock +
           byte % kUbBlock;
  }
  // Returns the end of the operand, as an offset in bytes. Its last byte is in the last repeat or in the last
  // complete repeat.
  uint64_t extent() const {
    const uint64_t of_whole = bytes_ / kRepeatBytes * kRepeatBytes;
    return std::max(place(bytes_ - 1), of_whole == 0 ? 0 : place(of_whole - 1)) + 1;
  }

  Strides strides_;
  uint64_t bytes_ = 0;
  UbSpan whole_{};
};

}  // namespace rec_sdk::emulator
