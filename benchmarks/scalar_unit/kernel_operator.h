// AscendC for counting the instructions of a vector core's scalar unit. Each call issues the instructions
// that CANN's own headers (asc-devkit 9.1.0, arch 2201, impl/basic_api/dav_c220) issue for it, one line of
// assembler each. benchmarks/npu_scalar.py counts them, together with the compiled code around them.
//
// Copies and reads of local memory are executed, because the control flow depends on them. Vector
// instructions are issued without effect. The emulator checks the order that the engines need
// (emulator/ascendc).
#pragma once

#include <cstdint>

#include "assembler.h"

#define __aicore__ __attribute__((always_inline))
#define __gm__
#define __ubuf__
#define __NPU_ARCH__ 2201

struct half {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};
enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };

// hardware.cpp
extern "C" {
extern int64_t scalar_unit_block, scalar_unit_blocks;
extern uint64_t scalar_unit_operands[4];
extern uint8_t scalar_unit_ub[];
extern uint32_t scalar_unit_ub_used;
}

namespace rec_sdk::scalar_unit {

inline __aicore__ void issue() { asm volatile("nop " REC_SDK_INSTRUCTION); }
inline __aicore__ void issue(uint64_t a) { asm volatile("nop " REC_SDK_INSTRUCTION ::"r"(a)); }
inline __aicore__ void issue(uint64_t a, uint64_t b) {
  asm volatile("nop " REC_SDK_INSTRUCTION ::"r"(a), "r"(b));
}
inline __aicore__ void issue(uint64_t a, uint64_t b, uint64_t c) {
  asm volatile("nop " REC_SDK_INSTRUCTION ::"r"(a), "r"(b), "r"(c));
}
inline __aicore__ void issue(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  asm volatile("nop " REC_SDK_INSTRUCTION ::"r"(a), "r"(b), "r"(c), "r"(d));
}

inline __aicore__ void copy_in(uint64_t to, uint64_t from, uint64_t blocks, uint64_t gaps) {
  REC_SDK_COPY("scalar_unit_copy_in", to, from, blocks, gaps);
}
inline __aicore__ void copy_out(uint64_t to, uint64_t from, uint64_t blocks, uint64_t gaps) {
  REC_SDK_COPY("scalar_unit_copy_out", to, from, blocks, gaps);
}

// Loads and stores of the scalar unit that the compiler cannot move across copies and flags.
template <class T>
inline __aicore__ T read(const T* at) {
  T value;
  if constexpr (sizeof(T) == 1) {
    uint32_t wide;
    REC_SDK_LOAD1(wide, *at);
    value = static_cast<T>(wide);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    REC_SDK_LOAD4(bits, *at);
    __builtin_memcpy(&value, &bits, 4);
  } else {
    static_assert(sizeof(T) == 8, "a scalar");
    uint64_t bits;
    REC_SDK_LOAD8(bits, *at);
    __builtin_memcpy(&value, &bits, 8);
  }
  return value;
}
template <class T>
inline __aicore__ void write(T* at, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a scalar");
  if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    REC_SDK_STORE4(*at, bits);
  } else {
    REC_SDK_STORE8(*at, value);
  }
}

}  // namespace rec_sdk::scalar_unit

namespace AscendC {

enum class TPosition : uint8_t { GM, VECIN, VECOUT, VECCALC };
enum class HardEvent : uint8_t {
  MTE2_V,
  V_MTE2,
  MTE3_V,
  V_MTE3,
  MTE3_MTE2,
  MTE2_MTE3,
  S_V,
  V_S,
  S_MTE2,
  MTE2_S,
  S_MTE3,
  MTE3_S,
  MAX
};
enum class RoundMode : uint8_t { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC };
enum class CacheLine : uint64_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT };

inline __aicore__ int64_t GetBlockIdx() { return scalar_unit_block; }
inline __aicore__ int64_t GetBlockNum() { return scalar_unit_blocks; }

template <class T>
class GlobalTensor {
 public:
  __aicore__ void SetGlobalBuffer(T* buffer, uint64_t) { data_ = buffer; }
  __aicore__ T GetValue(uint64_t offset) const { return rec_sdk::scalar_unit::read(data_ + offset); }
  __aicore__ uint64_t address() const { return reinterpret_cast<uint64_t>(data_); }

 private:
  T* data_ = nullptr;
};

template <class T>
class LocalTensor {
 public:
  LocalTensor() = default;
  __aicore__ explicit LocalTensor(uint8_t* data) : data_(data) {}
  __aicore__ T GetValue(uint32_t index) const {
    return rec_sdk::scalar_unit::read(reinterpret_cast<const T*>(data_) + index);
  }
  template <class S>
  __aicore__ void SetValue(uint32_t index, S value) const {
    rec_sdk::scalar_unit::write(reinterpret_cast<T*>(data_) + index, static_cast<T>(value));
  }
  __aicore__ LocalTensor operator[](uint32_t offset) const {
    return LocalTensor(data_ + uint64_t{offset} * sizeof(T));
  }
  template <class U>
  __aicore__ LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(data_);
  }
  __aicore__ uint64_t address() const { return reinterpret_cast<uint64_t>(data_); }

 private:
  uint8_t* data_;
};

template <HardEvent event>
inline __aicore__ void SetFlag(int32_t id) {
  rec_sdk::scalar_unit::issue(static_cast<uint64_t>(id));
}
template <HardEvent event>
inline __aicore__ void WaitFlag(int32_t id) {
  rec_sdk::scalar_unit::issue(static_cast<uint64_t>(id));
}
template <pipe_t pipe>
inline __aicore__ void PipeBarrier() {
  rec_sdk::scalar_unit::issue();
}

class TPipe {
 public:
  __aicore__ TPipe() { scalar_unit_ub_used = 0; }
  template <HardEvent event>
  __aicore__ int8_t AllocEventID() {
    return next_[static_cast<int>(event)]++;
  }
  template <HardEvent event>
  __aicore__ void ReleaseEventID(int8_t) {}
  template <class Queue>
  __aicore__ bool InitBuffer(Queue& queue, uint8_t count, uint32_t bytes) {
    queue.init(take(count * bytes), count, bytes);
    return true;
  }
  template <class Buffer>
  __aicore__ bool InitBuffer(Buffer& buffer, uint32_t bytes) {
    buffer.init(take((bytes + 31) / 32 * 32));
    return true;
  }

 private:
  __aicore__ uint8_t* take(uint32_t bytes) {
    uint8_t* at = scalar_unit_ub + scalar_unit_ub_used;
    scalar_unit_ub_used += bytes;
    return at;
  }
  int8_t next_[static_cast<int>(HardEvent::MAX)] = {};
};

template <TPosition position = TPosition::VECCALC>
class TBuf {
 public:
  template <class T>
  __aicore__ LocalTensor<T> Get() {
    return LocalTensor<T>(data_);
  }
  __aicore__ void init(uint8_t* data) { data_ = data; }

 private:
  uint8_t* data_;
};

// Queues as in kernel_tquebind_impl.h: a flag is set when a tensor is enqueued, and another when it is freed.
// The states and flags of each buffer are in the scalar unit's memory.
template <TPosition source, TPosition target, int32_t depth>
class TQueBind {
 public:
  template <class T>
  __aicore__ LocalTensor<T> AllocTensor() {
    Buffer* buffer;
    do {
      buffer = &buffers_[cursor_];
      if (++cursor_ == count_) cursor_ = 0;
    } while (buffer->occupied);
    buffer->occupied = true;
    if (buffer->free_flag >= 0) {
      rec_sdk::scalar_unit::issue(static_cast<uint64_t>(buffer->free_flag));
      flags_ &= ~(1u << buffer->free_flag);
      buffer->free_flag = -1;
    }
    return LocalTensor<T>(buffer->data);
  }
  template <class T>
  __aicore__ bool EnQue(const LocalTensor<T>& tensor) {
    Buffer* buffer = find(tensor.address());
    buffer->ready_flag = take_flag();
    rec_sdk::scalar_unit::issue(static_cast<uint64_t>(buffer->ready_flag));
    queue_[tail_] = buffer;
    if (++tail_ == depth) tail_ = 0;
    ++queued_;
    return true;
  }
  template <class T>
  __aicore__ LocalTensor<T> DeQue() {
    Buffer* buffer = queue_[head_];
    if (++head_ == depth) head_ = 0;
    --queued_;
    rec_sdk::scalar_unit::issue(static_cast<uint64_t>(buffer->ready_flag));
    flags_ &= ~(1u << buffer->ready_flag);
    buffer->ready_flag = -1;
    return LocalTensor<T>(buffer->data);
  }
  template <class T>
  __aicore__ void FreeTensor(LocalTensor<T>& tensor) {
    Buffer* buffer = find(tensor.address());
    buffer->free_flag = take_flag();
    rec_sdk::scalar_unit::issue(static_cast<uint64_t>(buffer->free_flag));
    buffer->occupied = false;
  }
  __aicore__ void init(uint8_t* data, int32_t count, uint32_t bytes) {
    count_ = count;
    for (int32_t i = 0; i < count; ++i) buffers_[i] = {data + uint64_t{bytes} * i, false, -1, -1};
  }

 private:
  struct Buffer {
    uint8_t* data;
    bool occupied;
    int32_t ready_flag, free_flag;
  };
  __aicore__ Buffer* find(uint64_t address) {
    return reinterpret_cast<uint64_t>(buffers_[0].data) == address ? &buffers_[0] : &buffers_[1];
  }
  __aicore__ int32_t take_flag() {
    const int32_t flag = __builtin_ctz(~flags_);
    flags_ |= 1u << flag;
    return flag;
  }

  Buffer buffers_[2];
  Buffer* queue_[depth];
  uint32_t flags_ = 0;
  int32_t count_ = 0, cursor_ = 0, head_ = 0, tail_ = 0, queued_ = 0;
};
template <TPosition position, int32_t depth>
class TQue : public TQueBind<position, position, depth> {};

struct DataCopyExtParams {
  uint16_t blockCount;
  uint32_t blockLen, srcStride, dstStride, rsv;
};
template <class T>
struct DataCopyPadExtParams {
  bool isPad;
  uint8_t leftPadding, rightPadding;
  T paddingValue;
};

inline __aicore__ uint64_t blocks_of(const DataCopyExtParams& params, uint64_t left, uint64_t right) {
  return uint64_t{params.blockCount} << 4 | uint64_t{params.blockLen} << 16 | left << 48 | right << 54;
}
inline __aicore__ uint64_t gaps_of(const DataCopyExtParams& params) {
  return uint64_t{params.srcStride} | uint64_t{params.dstStride} << 32;
}
template <class T>
inline __aicore__ void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                                   const DataCopyExtParams& params, const DataCopyPadExtParams<T>& padding) {
  if (padding.isPad) rec_sdk::scalar_unit::issue(0);  // set_mov_pad_val
  rec_sdk::scalar_unit::copy_in(dst.address(), src.address(),
                                blocks_of(params, padding.leftPadding, padding.rightPadding),
                                gaps_of(params));
}
template <class T>
inline __aicore__ void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src,
                                   const DataCopyExtParams& params) {
  rec_sdk::scalar_unit::copy_out(dst.address(), src.address(), blocks_of(params, 0, 0), gaps_of(params));
}

// A vector instruction on `count` elements sets a mask: the counter mode and two mask words before the
// instruction, and the same again after it.
inline __aicore__ void set_mask(uint64_t count) {
  rec_sdk::scalar_unit::issue();
  rec_sdk::scalar_unit::issue(0);
  rec_sdk::scalar_unit::issue(count);
}
inline __aicore__ void reset_mask() {
  rec_sdk::scalar_unit::issue();
  rec_sdk::scalar_unit::issue(~uint64_t{0});
  rec_sdk::scalar_unit::issue(~uint64_t{0});
}
constexpr uint64_t kRepeats = 1ull << 56 | 8ull << 40 | 8ull << 32 | 8ull << 24 | 1 << 16 | 1 << 8 | 1;
inline __aicore__ void vector2(uint64_t dst, uint64_t src, int32_t count) {
  set_mask(static_cast<uint32_t>(count));
  rec_sdk::scalar_unit::issue(dst, src, kRepeats);
  reset_mask();
}
inline __aicore__ void vector3(uint64_t dst, uint64_t a, uint64_t b, int32_t count) {
  set_mask(static_cast<uint32_t>(count));
  rec_sdk::scalar_unit::issue(dst, a, b, kRepeats);
  reset_mask();
}
template <class T>
inline __aicore__ uint64_t bits_of(T value) {
  uint32_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}

// The mask calls for kernels that use one mask for many instructions.
enum class MaskMode : uint8_t { NORMAL, COUNTER };
constexpr uint64_t MASK_PLACEHOLDER = 0;
struct BinaryRepeatParams {
  uint8_t dst_block, a_block, b_block, dst_repeat, a_repeat, b_repeat;
};
inline __aicore__ uint64_t repeats_of(const BinaryRepeatParams& strides) {
  return uint64_t{1} << 56 | uint64_t{strides.b_repeat} << 40 | uint64_t{strides.a_repeat} << 32 |
         uint64_t{strides.dst_repeat} << 24 | uint64_t{strides.b_block} << 16 |
         uint64_t{strides.a_block} << 8 | strides.dst_block;
}
struct UnaryRepeatParams {
  uint8_t dst_block, src_block, dst_repeat, src_repeat;
};
inline __aicore__ uint64_t repeats_of(const UnaryRepeatParams& strides) {
  return uint64_t{1} << 56 | uint64_t{strides.src_repeat} << 40 | uint64_t{strides.dst_repeat} << 32 |
         uint64_t{strides.src_block} << 16 | strides.dst_block;
}
inline __aicore__ void SetMaskCount() { rec_sdk::scalar_unit::issue(); }
inline __aicore__ void SetMaskNorm() { rec_sdk::scalar_unit::issue(); }
template <class T, MaskMode mode>
inline __aicore__ void SetVectorMask(int32_t count) {
  rec_sdk::scalar_unit::issue(0);
  rec_sdk::scalar_unit::issue(static_cast<uint32_t>(count));
}
inline __aicore__ void ResetMask() {
  rec_sdk::scalar_unit::issue(~uint64_t{0});
  rec_sdk::scalar_unit::issue(~uint64_t{0});
}

#define REC_SDK_BINARY(Name)                                                                               \
  template <class T>                                                                                       \
  inline __aicore__ void Name(const LocalTensor<T>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b, \
                              const int32_t& count) {                                                      \
    vector3(dst.address(), a.address(), b.address(), count);                                               \
  }                                                                                                        \
  template <class T, bool sets_mask>                                                                       \
  inline __aicore__ void Name(const LocalTensor<T>& dst, const LocalTensor<T>& a, const LocalTensor<T>& b, \
                              uint64_t, uint8_t, const BinaryRepeatParams& strides) {                      \
    static_assert(!sets_mask, "with a count instead");                                                     \
    rec_sdk::scalar_unit::issue(dst.address(), a.address(), b.address(), repeats_of(strides));             \
  }
#define REC_SDK_WITH_SCALAR(Name)                                                                    \
  template <class T>                                                                                 \
  inline __aicore__ void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, \
                              const int32_t& count) {                                                \
    vector3(dst.address(), src.address(), bits_of(scalar), count);                                   \
  }                                                                                                  \
  template <class T, bool sets_mask>                                                                 \
  inline __aicore__ void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, \
                              uint64_t, uint8_t, const UnaryRepeatParams& strides) {                 \
    static_assert(!sets_mask, "with a count instead");                                               \
    rec_sdk::scalar_unit::issue(dst.address(), src.address(), bits_of(scalar), repeats_of(strides)); \
  }
#define REC_SDK_UNARY(Name)                                                                                 \
  template <class T>                                                                                        \
  inline __aicore__ void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count) { \
    vector2(dst.address(), src.address(), count);                                                           \
  }
REC_SDK_BINARY(Add)
REC_SDK_BINARY(Sub)
REC_SDK_BINARY(Mul)
REC_SDK_BINARY(Div)
REC_SDK_BINARY(Max)
REC_SDK_WITH_SCALAR(Adds)
REC_SDK_WITH_SCALAR(Muls)
REC_SDK_WITH_SCALAR(Maxs)
REC_SDK_WITH_SCALAR(Mins)
REC_SDK_WITH_SCALAR(ShiftLeft)
REC_SDK_WITH_SCALAR(ShiftRight)
REC_SDK_UNARY(Sqrt)
REC_SDK_UNARY(Abs)
#undef REC_SDK_BINARY
#undef REC_SDK_WITH_SCALAR
#undef REC_SDK_UNARY

template <class T>
inline __aicore__ void Duplicate(const LocalTensor<T>& dst, const T& value, const int32_t& count) {
  vector2(dst.address(), bits_of(value), count);
}
template <class T, class U>
inline __aicore__ void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, RoundMode, uint32_t count) {
  vector2(dst.address(), src.address(), static_cast<int32_t>(count));
}
template <class T>
inline __aicore__ void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                              const LocalTensor<uint32_t>& offsets, uint32_t base, uint32_t count) {
  vector3(dst.address(), src.address() + base, offsets.address(), static_cast<int32_t>(count));
}

template <class T, CacheLine line, DcciDst destination>
inline __aicore__ void DataCacheCleanAndInvalid(const GlobalTensor<T>& at) {
  rec_sdk::scalar_unit::issue(at.address());
}

}  // namespace AscendC

inline __aicore__ int64_t get_ctrl() {
  rec_sdk::scalar_unit::issue();
  return 0;
}
inline __aicore__ void set_ctrl(uint64_t value) { rec_sdk::scalar_unit::issue(value); }
