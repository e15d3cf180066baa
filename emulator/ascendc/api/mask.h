// The mask: the number of values that vector instructions without a count process. It is set once for many
// instructions.
#pragma once

#include "emulator/ascendc/api/language.h"
#include "emulator/ascendc/engine/instructions.h"

namespace AscendC {

enum class MaskMode : uint8_t { NORMAL = 0, COUNTER };

constexpr uint64_t MASK_PLACEHOLDER = 0;

// The strides of the operands, in blocks of 32 bytes.
struct BinaryRepeatParams {
  uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
  uint8_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;

  BinaryRepeatParams() = default;
  BinaryRepeatParams(uint8_t dst_blocks, uint8_t src0_blocks, uint8_t src1_blocks, uint8_t dst_repeats,
                     uint8_t src0_repeats, uint8_t src1_repeats)
      : dstBlkStride(dst_blocks),
        src0BlkStride(src0_blocks),
        src1BlkStride(src1_blocks),
        dstRepStride(dst_repeats),
        src0RepStride(src0_repeats),
        src1RepStride(src1_repeats) {}
};

struct UnaryRepeatParams {
  uint16_t dstBlkStride = 1, srcBlkStride = 1;
  uint8_t dstRepStride = 8, srcRepStride = 8;

  UnaryRepeatParams() = default;
  UnaryRepeatParams(uint16_t dst_blocks, uint16_t src_blocks, uint8_t dst_repeats, uint8_t src_repeats)
      : dstBlkStride(dst_blocks),
        srcBlkStride(src_blocks),
        dstRepStride(dst_repeats),
        srcRepStride(src_repeats) {}
};

inline void SetMaskCount() { rec_sdk::emulator::set_mask_mode(true); }
inline void SetMaskNorm() { rec_sdk::emulator::set_mask_mode(false); }
inline void ResetMask() { rec_sdk::emulator::reset_mask(); }

template <typename T, MaskMode mode = MaskMode::NORMAL>
void SetVectorMask(int32_t len) {
  static_assert(mode == MaskMode::COUNTER, "SetVectorMask: the emulator knows MaskMode::COUNTER only");
  rec_sdk::emulator::set_mask(len);
}

}  // namespace AscendC
