#include "reduction.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace rec_sdk::emulator::hccl {
namespace {

// A bfloat16: the upper half of a float, rounded to nearest even.
struct BFloat16 {
  uint16_t bits;

  explicit BFloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const bool is_nan = (wide & 0x7fffffff) > 0x7f800000;
    bits = static_cast<uint16_t>(is_nan ? (wide >> 16) | 0x40 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

template <class T>
struct Wide {
  using Type = T;
};
template <>
struct Wide<_Float16> {
  using Type = float;
};
template <>
struct Wide<BFloat16> {
  using Type = float;
};

template <class T>
T larger(T a, T b) {
  return a != a || a > b ? a : b;  // a NaN is kept
}

template <class T>
T smaller(T a, T b) {
  return a != a || a < b ? a : b;
}

template <class T, class Combine>
void combine(const std::vector<const char*>& parts, char* out, uint64_t count, Combine op) {
  using W = typename Wide<T>::Type;
  for (uint64_t i = 0; i < count; ++i) {
    W sum = static_cast<W>(reinterpret_cast<const T*>(parts[0])[i]);
    for (size_t p = 1; p < parts.size(); ++p) {
      sum = static_cast<W>(op(sum, static_cast<W>(reinterpret_cast<const T*>(parts[p])[i])));
    }
    reinterpret_cast<T*>(out)[i] = static_cast<T>(sum);
  }
}

template <class T>
void reduce_as(const std::vector<const char*>& parts, char* out, uint64_t count, HcclReduceOp op) {
  using W = typename Wide<T>::Type;
  switch (op) {
    case HCCL_REDUCE_SUM:
      return combine<T>(parts, out, count, [](W a, W b) { return a + b; });
    case HCCL_REDUCE_PROD:
      return combine<T>(parts, out, count, [](W a, W b) { return a * b; });
    case HCCL_REDUCE_MAX:
      return combine<T>(parts, out, count, larger<W>);
    case HCCL_REDUCE_MIN:
      return combine<T>(parts, out, count, smaller<W>);
    default:
      throw std::runtime_error("reduce operation " + std::to_string(op) + " is not emulated");
  }
}

struct TypeEntry {
  HcclDataType type;
  uint64_t bytes;
  void (*reduce)(const std::vector<const char*>&, char*, uint64_t,
                 HcclReduceOp);  // null: the type can only be moved
};

constexpr TypeEntry kTypes[] = {
    {HCCL_DATA_TYPE_INT8, 1, reduce_as<int8_t>},
    {HCCL_DATA_TYPE_INT16, 2, reduce_as<int16_t>},
    {HCCL_DATA_TYPE_INT32, 4, reduce_as<int32_t>},
    {HCCL_DATA_TYPE_FP16, 2, reduce_as<_Float16>},
    {HCCL_DATA_TYPE_FP32, 4, reduce_as<float>},
    {HCCL_DATA_TYPE_INT64, 8, reduce_as<int64_t>},
    {HCCL_DATA_TYPE_UINT64, 8, reduce_as<uint64_t>},
    {HCCL_DATA_TYPE_UINT8, 1, reduce_as<uint8_t>},
    {HCCL_DATA_TYPE_UINT16, 2, reduce_as<uint16_t>},
    {HCCL_DATA_TYPE_UINT32, 4, reduce_as<uint32_t>},
    {HCCL_DATA_TYPE_FP64, 8, reduce_as<double>},
    {HCCL_DATA_TYPE_BFP16, 2, reduce_as<BFloat16>},
    {HCCL_DATA_TYPE_INT128, 16, nullptr},
    {HCCL_DATA_TYPE_HIF8, 1, nullptr},
    {HCCL_DATA_TYPE_FP8E4M3, 1, nullptr},
    {HCCL_DATA_TYPE_FP8E5M2, 1, nullptr},
    {HCCL_DATA_TYPE_FP8E8M0, 1, nullptr},
};

const TypeEntry& entry(HcclDataType type) {
  for (const TypeEntry& known : kTypes) {
    if (known.type == type) return known;
  }
  throw std::runtime_error("HCCL data type " + std::to_string(type) + " is not emulated");
}

}  // namespace

uint64_t element_bytes(HcclDataType type) { return entry(type).bytes; }

void reduce(const std::vector<const char*>& parts, char* out, uint64_t count, HcclDataType type,
            HcclReduceOp op) {
  const TypeEntry& known = entry(type);
  if (known.reduce == nullptr) {
    throw std::runtime_error("HCCL data type " + std::to_string(type) + " has no arithmetic");
  }
  known.reduce(parts, out, count, op);
}

}  // namespace rec_sdk::emulator::hccl
