// Device side: addresses, sizes and copies. `load` is MTE2 (GM to UB), `store` MTE3 (UB to GM); both return
// before the copy is complete, so a queue or a flag must order them with accesses to UB.
#pragma once

#include <cstdint>

#include "kernel_operator.h"
#include "op_kernels/common/arguments.h"

namespace rec_sdk {
namespace ascendc {

using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::TPipe;
using AscendC::TPosition;

using Scratch = AscendC::TBuf<TPosition::VECCALC>;  // used by vector instructions only: no copy may access it
using Landing = AscendC::TBuf<TPosition::VECIN>;    // used by copies in both directions

// The bytes that a kernel may use on arch 2201: 192 KB minus 256 bytes, minus 8 KB that the compiler
// reserves.
constexpr uint32_t kUbBytes = 188160;
constexpr uint32_t kUbBlock = 32;        // UB addresses of copies and vector instructions are multiples of it
constexpr int64_t kMaxDmaBlocks = 4095;  // maximum number of blocks of one DataCopyPad
// Maximum number of bytes between the blocks of a DataCopyPad in GM: half of the documented limit, so that no
// software layer can take the gap for a negative number (docs/npu.md).
constexpr int64_t kMaxGap = INT32_MAX;

// Casts a pointer from the kernel's arguments, which is already a device address, to a pointer to GM.
template <class T>
__aicore__ inline __gm__ T* gm(const void* pointer) {
  return reinterpret_cast<__gm__ T*>(reinterpret_cast<uint64_t>(pointer));
}

template <class T>
__aicore__ inline constexpr T minimum(T a, T b) {
  return a < b ? a : b;
}

template <class T>
__aicore__ inline constexpr T maximum(T a, T b) {
  return a < b ? b : a;
}

// Division for value >= 0 and by > 0. If `by` is a power of two, it takes one instruction, instead of three
// for a signed division.
__aicore__ inline constexpr int64_t quotient(int64_t value, int64_t by) {
  return static_cast<int64_t>(static_cast<uint64_t>(value) / static_cast<uint64_t>(by));
}
__aicore__ inline constexpr int64_t remainder(int64_t value, int64_t by) {
  return static_cast<int64_t>(static_cast<uint64_t>(value) % static_cast<uint64_t>(by));
}

__aicore__ inline constexpr int64_t ceil_div(int64_t value, int64_t by) {
  return quotient(value + by - 1, by);
}

__aicore__ inline constexpr int64_t align_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

__aicore__ inline constexpr int64_t align_down(int64_t value, int64_t multiple) {
  return quotient(value, multiple) * multiple;
}

// Precondition: value >= 1.
__aicore__ inline constexpr int32_t floor_log2(int64_t value) {
  int32_t log = 0;
  for (; value > 1; value >>= 1) ++log;
  return log;
}

template <class T>
__aicore__ inline GlobalTensor<T> global(const T* from, int64_t count) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(gm<T>(from), static_cast<uint64_t>(count));
  return tensor;
}

// Loads `count` values; the rest of their last UB block is undefined.
template <class T>
__aicore__ inline void load(const LocalTensor<T>& to, const T* from, int64_t count) {
  const AscendC::DataCopyExtParams one{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
  const AscendC::DataCopyPadExtParams<T> no_padding{false, 0, 0, 0};
  AscendC::DataCopyPad(to, global(from, count), one, no_padding);
}

// Loads like load(), and fills the rest of the last UB block with zeros, so that vector operations may run
// over it.
template <class T>
__aicore__ inline void load_padded(const LocalTensor<T>& to, const T* from, int64_t count) {
  const int64_t padding = align_up(count, kUbBlock / sizeof(T)) - count;
  const AscendC::DataCopyExtParams one{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
  const AscendC::DataCopyPadExtParams<T> zeros{padding > 0, 0, static_cast<uint8_t>(padding), 0};
  AscendC::DataCopyPad(to, global(from, count), one, zeros);
}

// Returns the parameters for copying rows of `count` values each; gm_pitch and ub_pitch are the values
// between the starts of rows. Preconditions: rows <= kMaxDmaBlocks, ub_pitch is whole UB blocks, the gap in
// GM is at most kMaxGap bytes.
template <class T>
__aicore__ inline AscendC::DataCopyExtParams row_blocks(int64_t rows, int64_t count, int64_t gm_pitch,
                                                        int64_t ub_pitch, bool to_ub) {
  if (rows == 1 || (gm_pitch == count && ub_pitch == count)) {  // one long block is faster than many
    return {1, static_cast<uint32_t>(rows * count * sizeof(T)), 0, 0, 0};
  }
  const auto bytes = static_cast<uint32_t>(count * sizeof(T));
  const auto gm_gap = static_cast<uint32_t>((gm_pitch - count) * sizeof(T));
  const auto ub_gap = static_cast<uint32_t>((ub_pitch * sizeof(T) - align_up(bytes, kUbBlock)) / kUbBlock);
  const auto blocks = static_cast<uint16_t>(rows);
  if (to_ub) return {blocks, bytes, gm_gap, ub_gap, 0};
  return {blocks, bytes, ub_gap, gm_gap, 0};
}

template <class T>
__aicore__ inline void load_rows(const LocalTensor<T>& to, const T* from, int64_t rows, int64_t count,
                                 int64_t gm_pitch, int64_t ub_pitch) {
  const AscendC::DataCopyPadExtParams<T> no_padding{false, 0, 0, 0};
  AscendC::DataCopyPad(to, global(from, (rows - 1) * gm_pitch + count),
                       row_blocks<T>(rows, count, gm_pitch, ub_pitch, true), no_padding);
}

template <class T>
__aicore__ inline void store_rows(const T* to, const LocalTensor<T>& from, int64_t rows, int64_t count,
                                  int64_t gm_pitch, int64_t ub_pitch) {
  AscendC::DataCopyPad(global(to, (rows - 1) * gm_pitch + count), from,
                       row_blocks<T>(rows, count, gm_pitch, ub_pitch, false));
}

template <class T>
__aicore__ inline void store(const T* to, const LocalTensor<T>& from, int64_t count) {
  const AscendC::DataCopyExtParams one{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
  AscendC::DataCopyPad(global(to, count), from, one);
}

// Copies values within UB. The vector unit adds 0 to their bits as integers, because float arithmetic may
// flush subnormal numbers.
__aicore__ inline void copy_values(const LocalTensor<float>& to, const LocalTensor<float>& from,
                                   int64_t count) {
  AscendC::Adds(to.ReinterpretCast<int32_t>(), from.ReinterpretCast<int32_t>(), 0,
                static_cast<int32_t>(count));
}

// Required between vector instructions that depend on each other.
__aicore__ inline void vector_barrier() { AscendC::PipeBarrier<PIPE_V>(); }

// Invalidates the data cache before the scalar unit reads GM that an earlier launch wrote. The end of a
// launch already does this for the launch's cores; repeating it costs one instruction.
template <class T>
__aicore__ inline void forget_cached(const T* any) {
  AscendC::DataCacheCleanAndInvalid<T, AscendC::CacheLine::ENTIRE_DATA_CACHE,
                                    AscendC::DcciDst::CACHELINE_OUT>(global(any, 1));
}

// The elements [begin, end) that a core processes.
struct Share {
  int64_t begin, end;
};

// Divides `count` elements of equal cost among the cores, and returns the share of this core.
__aicore__ inline Share share_of_core(int64_t count) {
  const int64_t cores = AscendC::GetBlockNum(), core = AscendC::GetBlockIdx();
  return {count * core / cores, count * (core + 1) / cores};
}

// Returns the number of rows of a tile: as many as fit, but at most a quarter of a core's rows, or 8 if that
// is more. So the loads of one tile overlap with the stores of another.
__aicore__ inline int64_t tile_rows(int64_t fit, int64_t rows_of_core) {
  constexpr int64_t kTilesOfCore = 4, kWorthATile = 8;
  return maximum<int64_t>(1, minimum(fit, maximum(kWorthATile, ceil_div(rows_of_core, kTilesOfCore))));
}

}  // namespace ascendc
}  // namespace rec_sdk
