// Copies between global and local memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulator/ascendc/api/tensors.h"

namespace AscendC {

struct DataCopyParams {
  DataCopyParams() = default;
  DataCopyParams(const uint16_t count, const uint16_t len, const uint16_t srcStrideIn,
                 const uint16_t dstStrideIn)
      : blockCount(count), blockLen(len), srcGap(srcStrideIn), dstGap(dstStrideIn) {}

  uint16_t blockCount = 1;
  uint16_t blockLen = 0;  // length and gaps in units of 32 bytes
  uint16_t srcGap = 0;
  uint16_t dstGap = 0;
};

#if REC_SDK_ASCENDC_ARCH == 3510
using CopyStride = int64_t;
#else
using CopyStride = uint32_t;
#endif

struct DataCopyExtParams {
  DataCopyExtParams() = default;
  DataCopyExtParams(const uint16_t count, const uint32_t len, const CopyStride srcStrideIn,
                    const CopyStride dstStrideIn, const uint32_t rsvIn)
      : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn), rsv(rsvIn) {}

  uint16_t blockCount = 1;
  uint32_t blockLen = 0;     // bytes
  CopyStride srcStride = 0;  // bytes in global memory, 32-byte blocks in local memory
  CopyStride dstStride = 0;
  uint32_t rsv = 0;
};

template <typename T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(const bool isPadValue, const uint8_t leftPadValue, const uint8_t rightPadValue,
                       T padValue)
      : isPad(isPadValue), leftPadding(leftPadValue), rightPadding(rightPadValue), paddingValue(padValue) {}

  bool isPad = false;
  uint8_t leftPadding = 0;  // elements
  uint8_t rightPadding = 0;
  T paddingValue = T(0);
};

template <typename T>
constexpr bool kCopyable = kOneOf<T, int8_t, uint8_t, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t,
                                  float, int64_t, uint64_t, double>;

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& padding) {
  static_assert(kCopyable<T>, "DataCopyPad: no such type");
  uint64_t value = 0;
  std::memcpy(&value, &padding.paddingValue, sizeof(T));
  rec_sdk::emulator::copy_in({"DataCopyPad", &rec_sdk::emulator::kTypeTag<T>, dst.memory(), src.memory(),
                              sizeof(T), params.blockCount, params.blockLen,
                              static_cast<int64_t>(params.srcStride), static_cast<int64_t>(params.dstStride)},
                             {padding.isPad, padding.leftPadding, padding.rightPadding, value});
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params) {
  static_assert(kCopyable<T>, "DataCopyPad: no such type");
  rec_sdk::emulator::copy_out({"DataCopyPad", &rec_sdk::emulator::kTypeTag<T>, src.memory(), dst.memory(),
                               sizeof(T), params.blockCount, params.blockLen,
                               static_cast<int64_t>(params.dstStride),
                               static_cast<int64_t>(params.srcStride)});
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params) {
  static_assert(kCopyable<T>, "DataCopy: no such type");
  rec_sdk::emulator::copy_in(
      {"DataCopy", &rec_sdk::emulator::kTypeTag<T>, dst.memory(), src.memory(), sizeof(T), params.blockCount,
       int64_t{params.blockLen} * ONE_BLK_SIZE, int64_t{params.srcGap} * ONE_BLK_SIZE, params.dstGap},
      {});
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params) {
  static_assert(kCopyable<T>, "DataCopy: no such type");
  rec_sdk::emulator::copy_out({"DataCopy", &rec_sdk::emulator::kTypeTag<T>, src.memory(), dst.memory(),
                               sizeof(T), params.blockCount, int64_t{params.blockLen} * ONE_BLK_SIZE,
                               int64_t{params.dstGap} * ONE_BLK_SIZE, params.srcGap});
}

// count * sizeof(T) must be a multiple of 32, because the hardware silently rounds it down.
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count) {
  static_assert(kCopyable<T>, "DataCopy: no such type");
  rec_sdk::emulator::copy_in({"DataCopy", &rec_sdk::emulator::kTypeTag<T>, dst.memory(), src.memory(),
                              sizeof(T), 1, int64_t{count} * int64_t{sizeof(T)}, 0, 0},
                             {});
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count) {
  static_assert(kCopyable<T>, "DataCopy: no such type");
  rec_sdk::emulator::copy_out({"DataCopy", &rec_sdk::emulator::kTypeTag<T>, src.memory(), dst.memory(),
                               sizeof(T), 1, int64_t{count} * int64_t{sizeof(T)}, 0, 0});
}

}  // namespace AscendC
