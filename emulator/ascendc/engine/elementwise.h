// The arithmetic of vector instructions, on plain arrays. Results are computed in IEEE single precision, also
// for half, and rounded once to the result type. dst may be the same array as a or b.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

enum class BinaryOp { kAdd, kSub, kMul, kDiv, kMax, kMin };
enum class ShiftOp { kLeft, kRight };
enum class UnaryOp { kSqrt, kRsqrt, kExp, kLn, kAbs, kReciprocal };

// The treatment of an integer result that does not fit into T: it wraps to its low bits, or saturates to the
// nearest T.
enum class Overflow { kWraps, kSaturates };

// Computes dst = a op b. On 950, a subnormal quotient becomes 0 with the same sign.
template <BinaryOp op, class T, Overflow overflow = Overflow::kWraps>
void binary(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// Computes dst = a op scalar.
template <BinaryOp op, class T, Overflow overflow = Overflow::kWraps>
void with_scalar(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// Shifts by a scalar number of bits. A right shift of a signed T shifts in copies of the sign bit. After a
// shift by the width of T or more, only copies of the sign bit are left.
template <ShiftOp op, class T>
void shift(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// Computes dst = op(a). Rsqrt and Reciprocal are deliberately as inexact as on hardware.
template <UnaryOp op, class T>
void unary(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// Computes dst += a * scalar, where the product is rounded to T first.
template <class T, class U>
void axpy(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

template <class T>
void duplicate(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// Computes dst[0] = the sum of a, in the order of A2 and A3. Within each block of 256 bytes, neighbours are
// added in pairs, then the sums of neighbouring pairs, and so on. The sums of the blocks are then added one
// after another.
template <class T>
void reduce_sum(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

// Saturates 16-bit results in place: infinity becomes the largest number, and NaN becomes 0.
template <class T>
void saturate(void* values, int64_t count);

// The rounding modes of AscendC::RoundMode, for values that the result type cannot represent.
enum class Rounding { kNone, kRint, kFloor, kCeil, kRound, kTrunc };
template <class T, class U, Rounding rounding>
void cast(void* dst, const void* a, const void* b, const void* scalar, int64_t count);

}  // namespace rec_sdk::emulator
