// The arithmetic of vector instructions, compiled with -O3 and -ffp-contract=off. The functions for all
// operations and types are instantiated here and not in headers, so that the sources of kernels compile
// quickly.
#include "emulator/ascendc/engine/elementwise.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "emulator/ascendc/api/types.h"
#include "emulator/chips.h"

namespace rec_sdk::emulator {
namespace {

// The type in which operations on T are computed: float for 16-bit floats.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>, float, T>;

template <class T>
Wide<T> widen(T value) {
  return static_cast<Wide<T>>(value);
}

// Clamps a value to the range of an integer type.
template <class T>
T clamped(int64_t value) {
  constexpr int64_t kLeast = std::numeric_limits<T>::min(), kMost = std::numeric_limits<T>::max();
  return static_cast<T>(value < kLeast ? kLeast : value > kMost ? kMost : value);
}

template <BinaryOp op, class T, Overflow overflow>
T apply(T a, T b) {
  if constexpr (std::is_integral_v<T> && op <= BinaryOp::kMul && overflow == Overflow::kSaturates) {
    const int64_t x = a, y = b;
    return clamped<T>(op == BinaryOp::kAdd ? x + y : op == BinaryOp::kSub ? x - y : x * y);
  } else if constexpr (std::is_integral_v<T> && op <= BinaryOp::kMul) {
    // The operation is computed with unsigned integers, so that overflow wraps.
    using U = std::make_unsigned_t<decltype(a + b)>;
    const auto x = static_cast<U>(a), y = static_cast<U>(b);
    return static_cast<T>(op == BinaryOp::kAdd ? x + y : op == BinaryOp::kSub ? x - y : x * y);
  } else if constexpr (op == BinaryOp::kAdd) {
    return a + b;
  } else if constexpr (op == BinaryOp::kSub) {
    return a - b;
  } else if constexpr (op == BinaryOp::kMul) {
    return a * b;
  } else if constexpr (op == BinaryOp::kDiv) {
    return a / b;
  } else {
    const T chosen = op == BinaryOp::kMax ? (a > b ? a : b) : (a < b ? a : b);
    if constexpr (std::is_floating_point_v<T>) {
      return a != a ? a : chosen;  // if b is NaN, `chosen` is already b
    } else {
      return chosen;
    }
  }
}

template <class T>
constexpr T kLeastNormal = std::numeric_limits<T>::min();
template <>
constexpr float kLeastNormal<half> = 0x1p-14f;

// Converts a result to the stored type as the chip does.
template <BinaryOp op, class T>
T stored(Wide<T> value) {
  if constexpr (op == BinaryOp::kDiv && REC_SDK_ASCENDC_ARCH == 3510) {
    return T(std::fabs(value) < kLeastNormal<T> ? std::copysign(0.0f, value) : value);
  } else {
    return T(value);
  }
}

// Reduces the precision of a result as far as CANN's documentation permits: errors may exceed 1e-4 for float
// and 1e-3 for half. A kernel that needs more precision must divide.
template <class T>
float coarse(float value) {
  constexpr uint32_t kKept = std::is_same_v<T, half> ? 8 : 11;  // number of kept bits of the fraction
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits &= ~((1u << (23 - kKept)) - 1);
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

template <UnaryOp op, class T>
float apply_unary(float a) {
  switch (op) {
    case UnaryOp::kSqrt:
      return std::sqrt(a);
    case UnaryOp::kRsqrt:
      return coarse<T>(1.0f / std::sqrt(a));
    case UnaryOp::kExp:
      return std::exp(a);
    case UnaryOp::kLn:
      return std::log(a);
    case UnaryOp::kAbs:
      return std::fabs(a);
    case UnaryOp::kReciprocal:
      return coarse<T>(1.0f / a);
  }
  return a;
}

template <class T>
T scalar_of(const void* scalar) {
  T value;
  std::memcpy(&value, scalar, sizeof(T));
  return value;
}

}  // namespace

// `#pragma GCC ivdep` is valid, because dst is either equal to a or b or overlaps neither.
template <BinaryOp op, class T, Overflow overflow>
void binary(void* dst, const void* a, const void* b, const void*, int64_t count) {
  auto* out = static_cast<T*>(dst);
  const auto* x = static_cast<const T*>(a);
  const auto* y = static_cast<const T*>(b);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    out[i] = stored<op, T>(apply<op, Wide<T>, overflow>(widen(x[i]), widen(y[i])));
  }
}

template <BinaryOp op, class T, Overflow overflow>
void with_scalar(void* dst, const void* a, const void*, const void* scalar, int64_t count) {
  auto* out = static_cast<T*>(dst);
  const auto* x = static_cast<const T*>(a);
  const auto y = widen(scalar_of<T>(scalar));
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    out[i] = T(apply<op, Wide<T>, overflow>(widen(x[i]), y));
  }
}

template <ShiftOp op, class T>
void shift(void* dst, const void* a, const void*, const void* scalar, int64_t count) {
  constexpr int kMost = 8 * sizeof(T) - 1;
  auto* out = static_cast<T*>(dst);
  const auto* x = static_cast<const T*>(a);
  const auto bits = static_cast<uint64_t>(scalar_of<T>(scalar));
  const int last = bits > kMost ? 1 : 0, by = static_cast<int>(bits > kMost ? kMost : bits);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (op == ShiftOp::kLeft) {
      out[i] = static_cast<T>(static_cast<uint64_t>(x[i]) << by << last);
    } else {
      out[i] = static_cast<T>(x[i] >> by >> last);
    }
  }
}

template <UnaryOp op, class T>
void unary(void* dst, const void* a, const void*, const void*, int64_t count) {
  auto* out = static_cast<T*>(dst);
  const auto* x = static_cast<const T*>(a);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    out[i] = T(apply_unary<op, T>(widen(x[i])));
  }
}

template <class T, class U>
void axpy(void* dst, const void* a, const void*, const void* scalar, int64_t count) {
  auto* out = static_cast<T*>(dst);
  const auto* x = static_cast<const U*>(a);
  const auto y = widen(scalar_of<U>(scalar));
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const T product = T(widen(x[i]) * y);
    out[i] = T(widen(out[i]) + widen(product));
  }
}

template <class T>
void duplicate(void* dst, const void*, const void*, const void* scalar, int64_t count) {
  auto* out = static_cast<T*>(dst);
  const T value = scalar_of<T>(scalar);
  for (int64_t i = 0; i < count; ++i) {
    out[i] = value;
  }
}

template <class T>
void reduce_sum(void* dst, const void* a, const void*, const void*, int64_t count) {
  constexpr int64_t kRepeat = 256 / sizeof(T);  // number of elements that the vector unit processes at a time
  const auto* x = static_cast<const T*>(a);
  T total{};
  for (int64_t begin = 0; begin < count; begin += kRepeat) {
    T sums[kRepeat];
    int64_t left = count - begin < kRepeat ? count - begin : kRepeat;
    std::memcpy(sums, x + begin, static_cast<size_t>(left) * sizeof(T));
    for (; left > 1; left = left / 2 + left % 2) {
      for (int64_t i = 0; i < left / 2; ++i) {
        sums[i] = T(widen(sums[2 * i]) + widen(sums[2 * i + 1]));
      }
      if (left % 2 != 0) {
        sums[left / 2] = sums[left - 1];
      }
    }
    total = begin == 0 ? sums[0] : T(widen(total) + widen(sums[0]));
  }
  std::memcpy(dst, &total, sizeof(T));
}

namespace {

template <Rounding rounding>
double to_integer(double value) {
  switch (rounding) {
    case Rounding::kFloor:
      return std::floor(value);
    case Rounding::kCeil:
      return std::ceil(value);
    case Rounding::kRound:
      return std::round(value);
    case Rounding::kTrunc:
      return std::trunc(value);
    default:
      return std::nearbyint(value);
  }
}

// Clamps a value to the range of an integer type; NaN becomes 0.
template <class T>
T saturated(double value) {
  constexpr T kLeast = std::numeric_limits<T>::min(), kMost = std::numeric_limits<T>::max();
  if (value != value) {
    return 0;
  }
  if (value <= static_cast<double>(kLeast)) {
    return kLeast;
  }
  return value >= static_cast<double>(kMost) ? kMost : static_cast<T>(value);
}

template <class T, class U, Rounding rounding>
T convert(U value) {
  if constexpr (!std::is_integral_v<T>) {
    if constexpr (std::is_same_v<T, float> && std::is_same_v<U, float>) {
      return static_cast<float>(to_integer<rounding>(value));
    } else {
      return T(static_cast<float>(value));
    }
  } else if constexpr (std::is_integral_v<U>) {
    if constexpr (sizeof(T) >= sizeof(U)) {
      return value;
    } else {
      return clamped<T>(value);
    }
  } else {
    return saturated<T>(to_integer<rounding>(static_cast<float>(value)));
  }
}

}  // namespace

template <class T, class U, Rounding rounding>
void cast(void* dst, const void* a, const void*, const void*, int64_t count) {
  auto* out = static_cast<T*>(dst);
  const auto* x = static_cast<const U*>(a);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    out[i] = convert<T, U, rounding>(x[i]);
  }
}

template <class T>
void saturate(void* values, int64_t count) {
  constexpr uint16_t kInfinity = std::is_same_v<T, half> ? 0x7c00 : 0x7f80, kMagnitude = 0x7fff;
  auto* bits = static_cast<uint16_t*>(values);
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t magnitude = bits[i] & kMagnitude;
    const auto largest = static_cast<uint16_t>(bits[i] - 1);
    bits[i] = magnitude > kInfinity ? 0 : magnitude == kInfinity ? largest : bits[i];
  }
}

template void saturate<half>(void*, int64_t);
template void saturate<bfloat16_t>(void*, int64_t);

#define REC_SDK_VECTOR(function, ...) \
  template void function<__VA_ARGS__>(void*, const void*, const void*, const void*, int64_t);
#define REC_SDK_BINARY(op, T)             \
  REC_SDK_VECTOR(binary, BinaryOp::op, T) \
  REC_SDK_VECTOR(with_scalar, BinaryOp::op, T)
#define REC_SDK_SATURATING(op, T)                               \
  REC_SDK_VECTOR(binary, BinaryOp::op, T, Overflow::kSaturates) \
  REC_SDK_VECTOR(with_scalar, BinaryOp::op, T, Overflow::kSaturates)
#define REC_SDK_INTEGERS(T)   \
  REC_SDK_SATURATING(kAdd, T) \
  REC_SDK_SATURATING(kSub, T) \
  REC_SDK_SATURATING(kMul, T)
#define REC_SDK_ARITHMETIC(T) \
  REC_SDK_BINARY(kAdd, T)     \
  REC_SDK_BINARY(kSub, T)     \
  REC_SDK_BINARY(kMul, T)     \
  REC_SDK_BINARY(kMax, T)     \
  REC_SDK_BINARY(kMin, T)
#define REC_SDK_UNARY(T)                         \
  REC_SDK_VECTOR(unary, UnaryOp::kSqrt, T)       \
  REC_SDK_VECTOR(unary, UnaryOp::kRsqrt, T)      \
  REC_SDK_VECTOR(unary, UnaryOp::kExp, T)        \
  REC_SDK_VECTOR(unary, UnaryOp::kLn, T)         \
  REC_SDK_VECTOR(unary, UnaryOp::kAbs, T)        \
  REC_SDK_VECTOR(unary, UnaryOp::kReciprocal, T) \
  REC_SDK_VECTOR(reduce_sum, T)                  \
  REC_SDK_VECTOR(binary, BinaryOp::kDiv, T)
#define REC_SDK_ROUNDED(T, U)                  \
  REC_SDK_VECTOR(cast, T, U, Rounding::kRint)  \
  REC_SDK_VECTOR(cast, T, U, Rounding::kFloor) \
  REC_SDK_VECTOR(cast, T, U, Rounding::kCeil)  \
  REC_SDK_VECTOR(cast, T, U, Rounding::kRound) \
  REC_SDK_VECTOR(cast, T, U, Rounding::kTrunc)

#define REC_SDK_SHIFTS(T)                  \
  REC_SDK_VECTOR(shift, ShiftOp::kLeft, T) \
  REC_SDK_VECTOR(shift, ShiftOp::kRight, T)

REC_SDK_ARITHMETIC(half)
REC_SDK_ARITHMETIC(float)
REC_SDK_ARITHMETIC(int16_t)
REC_SDK_ARITHMETIC(int32_t)
REC_SDK_INTEGERS(int16_t)
REC_SDK_INTEGERS(int32_t)
REC_SDK_SHIFTS(int16_t)
REC_SDK_SHIFTS(uint16_t)
REC_SDK_SHIFTS(int32_t)
REC_SDK_SHIFTS(uint32_t)
REC_SDK_UNARY(half)
REC_SDK_UNARY(float)
REC_SDK_VECTOR(axpy, half, half)
REC_SDK_VECTOR(axpy, float, float)
REC_SDK_VECTOR(axpy, float, half)
REC_SDK_VECTOR(duplicate, uint16_t)
REC_SDK_VECTOR(duplicate, uint32_t)

REC_SDK_VECTOR(cast, float, half, Rounding::kNone)
REC_SDK_VECTOR(cast, float, bfloat16_t, Rounding::kNone)
REC_SDK_VECTOR(cast, float, int16_t, Rounding::kNone)
REC_SDK_VECTOR(cast, float, int32_t, Rounding::kRint)
REC_SDK_VECTOR(cast, float, int64_t, Rounding::kRint)
REC_SDK_VECTOR(cast, half, float, Rounding::kRint)
REC_SDK_VECTOR(cast, half, int16_t, Rounding::kRint)
REC_SDK_VECTOR(cast, bfloat16_t, float, Rounding::kRint)
REC_SDK_VECTOR(cast, int64_t, int32_t, Rounding::kNone)
REC_SDK_VECTOR(cast, int32_t, int64_t, Rounding::kNone)
REC_SDK_VECTOR(cast, int16_t, int32_t, Rounding::kNone)
REC_SDK_ROUNDED(float, float)
REC_SDK_ROUNDED(int16_t, float)
REC_SDK_ROUNDED(int32_t, float)
REC_SDK_ROUNDED(int64_t, float)
REC_SDK_ROUNDED(int16_t, half)
REC_SDK_ROUNDED(int32_t, half)
REC_SDK_ROUNDED(int32_t, bfloat16_t)

}  // namespace rec_sdk::emulator
