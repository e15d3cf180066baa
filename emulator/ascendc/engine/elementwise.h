// The arithmetic of vector instructions on plain arrays. Each result is rounded once, as in IEEE single
// precision or, for half, as if computed in single precision and then rounded. dst may be a or b.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

enum class BinaryOp { kAdd, kSub, kMul, kDiv, kMax, kMin };
enum class ShiftOp { kLeft, kRight };
enum class UnaryOp { kSqrt, kRsqrt, kExp, kLn, kAbs, kReciprocal };

// Where the result of an operation on integers has more bits than T: the low ones, or the nearest T.
enum class Overflow { kWraps, kSaturates };

// dst = a op b. On 950 a subnormal quotient becomes 0, with its sign.
template <BinaryOp op, class T, Overflow overflow = Overflow::kWraps>
void binary(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// dst = a op scalar
template <BinaryOp op, class T, Overflow overflow = Overflow::kWraps>
void with_scalar(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// By bits of the scalar, a T; to the right, copies of the sign come in where T has one. By as many bits as T
// has, or more, nothing is left but the sign.
template <ShiftOp op, class T>
void shift(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// Rsqrt and Reciprocal are deliberately as inexact as the hardware's.
template <UnaryOp op, class T>
void unary(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// dst += a * scalar, with the product rounded to T first.
template <class T, class U>
void axpy(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

template <class T>
void duplicate(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// dst[0] = the sum, in the order of A2 and A3: within each 256 bytes neighbours are added in pairs, then
// these sums in pairs, and so on; what comes out is added up one after the other.
template <class T>
void reduce_sum(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// 16-bit results while a core saturates: infinity becomes the largest number, and what is not a number
// becomes 0.
template <class T>
void saturate(void* values, int64_t count);

// Modes as in AscendC::RoundMode: how a value that T has not is rounded.
enum class Rounding { kNone, kRint, kFloor, kCeil, kRound, kTrunc };
template <class T, class U, Rounding rounding>
void cast(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

}  // namespace rec_sdk::emulator
