// Vector instructions that share one mask. An instruction with a count sets and restores the mask, which
// takes six instructions of the scalar unit. Here the mask is set once for many instructions. All calls use
// the strided form, because in the form with a count, the chip 950 uses the count instead of the mask.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

// No other vector instruction may be issued between begin() and end().
class OneMask {
 public:
  __aicore__ inline static void begin(int64_t count) {
    AscendC::SetMaskCount();
    go_on(count);
  }
  // Sets the number of elements of the following instructions.
  __aicore__ inline static void go_on(int64_t count) {
    AscendC::SetVectorMask<float, AscendC::MaskMode::COUNTER>(static_cast<int32_t>(count));
  }
  __aicore__ inline static void end() {
    AscendC::SetMaskNorm();
    AscendC::ResetMask();
  }

  __aicore__ inline static void add(const LocalTensor<float>& to, const LocalTensor<float>& a,
                                    const LocalTensor<float>& b) {
    AscendC::Add<float, false>(to, a, b, AscendC::MASK_PLACEHOLDER, 1, {1, 1, 1, 8, 8, 8});
  }
  // Computes to += values. Consecutive blocks of `values` are `block` blocks apart, and groups of 8 blocks
  // are `repeat` blocks apart. `to` is contiguous.
  __aicore__ inline static void add_strided(const LocalTensor<float>& to, const LocalTensor<float>& values,
                                            uint8_t block, uint8_t repeat) {
    AscendC::Add<float, false>(to, to, values, AscendC::MASK_PLACEHOLDER, 1, {1, 1, block, 8, 8, repeat});
  }
  // Sets each element of `to` to the larger of it and the element of `values`, compared as integers; the
  // layout is as in add_strided().
  __aicore__ inline static void largest_strided(const LocalTensor<float>& to,
                                                const LocalTensor<float>& values, uint8_t block,
                                                uint8_t repeat) {
    const LocalTensor<int32_t> bits = to.ReinterpretCast<int32_t>();
    AscendC::Max<int32_t, false>(bits, bits, values.ReinterpretCast<int32_t>(), AscendC::MASK_PLACEHOLDER, 1,
                                 {1, 1, block, 8, 8, repeat});
  }
  __aicore__ inline static void multiply(const LocalTensor<float>& to, const LocalTensor<float>& a,
                                         const LocalTensor<float>& b) {
    AscendC::Mul<float, false>(to, a, b, AscendC::MASK_PLACEHOLDER, 1, {1, 1, 1, 8, 8, 8});
  }
  // Computes to = a + b in repeats of kRepeat values; the last three arguments are the distances between
  // repeats in blocks.
  static constexpr int64_t kRepeat = 64;
  __aicore__ inline static void add_repeats(const LocalTensor<float>& to, const LocalTensor<float>& a,
                                            const LocalTensor<float>& b, uint8_t to_repeat, uint8_t a_repeat,
                                            uint8_t b_repeat) {
    AscendC::Add<float, false>(to, a, b, AscendC::MASK_PLACEHOLDER, 1,
                               {1, 1, 1, to_repeat, a_repeat, b_repeat});
  }
  // Computes to = a + b in one repeat of at most 8 blocks; the last three arguments are the distances between
  // blocks of each operand.
  static constexpr int64_t kBlocks = 8;
  __aicore__ inline static void add_blocks(const LocalTensor<float>& to, const LocalTensor<float>& a,
                                           const LocalTensor<float>& b, uint8_t to_block, uint8_t a_block,
                                           uint8_t b_block) {
    AscendC::Add<float, false>(to, a, b, AscendC::MASK_PLACEHOLDER, 1, {to_block, a_block, b_block, 8, 8, 8});
  }
  // Computes to = a * b, where a is the same in each repeat.
  __aicore__ inline static void multiply_repeats(const LocalTensor<float>& to, const LocalTensor<float>& a,
                                                 const LocalTensor<float>& b, uint8_t to_repeat,
                                                 uint8_t b_repeat) {
    AscendC::Mul<float, false>(to, a, b, AscendC::MASK_PLACEHOLDER, 1, {1, 1, 1, to_repeat, 0, b_repeat});
  }
  __aicore__ inline static void scale(const LocalTensor<float>& values, float by) {
    scale_to(values, values, by);
  }
  __aicore__ inline static void scale_to(const LocalTensor<float>& to, const LocalTensor<float>& values,
                                         float by) {
    AscendC::Muls<float, false>(to, values, by, AscendC::MASK_PLACEHOLDER, 1, {1, 1, 8, 8});
  }
  // Copies values as copy_values() does.
  __aicore__ inline static void copy(const LocalTensor<float>& to, const LocalTensor<float>& from) {
    copy_strided(to, from, 1, 8);
  }
  // Copies to blocks of 8 values that are `block` blocks apart, in groups of 8 blocks that are `repeat`
  // blocks apart.
  __aicore__ inline static void copy_strided(const LocalTensor<float>& to, const LocalTensor<float>& from,
                                             uint8_t block, uint8_t repeat) {
    AscendC::Adds<int32_t, false>(to.ReinterpretCast<int32_t>(), from.ReinterpretCast<int32_t>(), 0,
                                  AscendC::MASK_PLACEHOLDER, 1, {block, 1, repeat, 8});
  }
};

}  // namespace ascendc
}  // namespace rec_sdk
