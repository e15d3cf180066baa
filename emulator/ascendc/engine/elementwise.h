// The arithmetic of vector instructions on plain arrays. Each result is rounded once, as in IEEE single
// precision; half results are computed in single precision and then rounded. dst may equal a or b.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

enum class BinaryOp { kAdd, kSub, kMul, kDiv, kMax, kMin };
enum class ShiftOp { kLeft, kRight };
enum class UnaryOp { kSqrt, kRsqrt, kExp, kLn, kAbs, kReciprocal };

// The overflow of integer results: wrap to the low bits, or saturate to the nearest T.
enum class Overflow { kWraps, kSaturates };

// dst = a op b. On 950 a subnormal quotient becomes 0, with its sign.
template <BinaryOp op, class T, Overflow overflow = Overflow::kWraps>
void binary(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// dst = a op scalar
template <BinaryOp op, class T, Overflow overflow = Overflow::kWraps>
void with_scalar(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// Shifts by a scalar number of bits; a right shift of a signed T shifts in copies of the sign. A shift by the
// width of T, or more, leaves only the sign.
template <ShiftOp op, class T>
void shift(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// Rsqrt and Reciprocal are deliberately as inexact as on the hardware.
template <UnaryOp op, class T>
void unary(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// dst += a * scalar, with the product rounded to T first.
template <class T, class U>
void axpy(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

template <class T>
void duplicate(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// dst[0] = the sum, in the order of A2 and A3: within each 256 bytes neighbours are added in pairs, then
// their sums in pairs, and so on; the sums of all 256-byte blocks are then added one after the other.
template <class T>
void reduce_sum(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// Saturates 16-bit results: infinity becomes the largest number, and NaN becomes 0.
template <class T>
void saturate(void* values, int64_t count);

// The rounding modes of AscendC::RoundMode, for values that T cannot represent.
enum class Rounding { kNone, kRint, kFloor, kCeil, kRound, kTrunc };
template <class T, class U, Rounding rounding>
void cast(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

}  // namespace rec_sdk::emulator
