// Instructions of the vector unit, in two forms. The count form processes the first `count` elements of its
// tensors. The mask form, with isSetMask = false, processes as many elements as the mask says, in blocks with
// strides.
#pragma once

#include "emulator/ascendc/api/flags.h"
#include "emulator/ascendc/api/mask.h"
#include "emulator/ascendc/api/saturation.h"
#include "emulator/ascendc/api/tensors.h"
#include "emulator/ascendc/engine/elementwise.h"

namespace AscendC {

template <class T>
constexpr bool kNumber = kOneOf<T, half, float, int16_t, int32_t>;
template <class T>
constexpr bool kShifted = kOneOf<T, int16_t, uint16_t, int32_t, uint32_t>;
template <class T>
constexpr bool kFloating = kOneOf<T, half, float>;

// The function of an instruction, and its variant for a core whose integers saturate; the variant is null if
// it would be the same.
struct Arithmetic {
  rec_sdk::emulator::ElementFunction function, saturating = nullptr;
};

template <typename T, rec_sdk::emulator::BinaryOp op>
constexpr bool kOverflows = kOneOf<T, int16_t, int32_t> && op <= rec_sdk::emulator::BinaryOp::kMul;

template <typename T, rec_sdk::emulator::BinaryOp op>
constexpr Arithmetic binary_function() {
  using namespace rec_sdk::emulator;
  if constexpr (kOverflows<T, op>) {
    return {rec_sdk::emulator::binary<op, T>, rec_sdk::emulator::binary<op, T, Overflow::kSaturates>};
  } else {
    return {rec_sdk::emulator::binary<op, T>};
  }
}

template <typename T, rec_sdk::emulator::BinaryOp op>
constexpr Arithmetic with_scalar_function() {
  using namespace rec_sdk::emulator;
  if constexpr (kOverflows<T, op>) {
    return {rec_sdk::emulator::with_scalar<op, T>,
            rec_sdk::emulator::with_scalar<op, T, Overflow::kSaturates>};
  } else {
    return {rec_sdk::emulator::with_scalar<op, T>};
  }
}

template <typename T, rec_sdk::emulator::ShiftOp op>
constexpr Arithmetic shift_function() {
  return {rec_sdk::emulator::shift<op, T>};
}

template <typename T>
void binary(const char* name, const Arithmetic& arithmetic, const LocalTensor<T>& dst,
            const LocalTensor<T>& src0, const LocalTensor<T>& src1, int64_t count, uint8_t repeats = 1,
            const BinaryRepeatParams& strides = {}) {
  rec_sdk::emulator::VectorCall call = vector_call(name, dst, count);
  call.function = arithmetic.function;
  call.saturating = arithmetic.saturating;
  call.a = &src0.memory();
  call.b = &src1.memory();
  call.src_bytes = sizeof(T);
  call.repeats = repeats;
  call.dst_strides = {strides.dstBlkStride, strides.dstRepStride};
  call.a_strides = {strides.src0BlkStride, strides.src0RepStride};
  call.b_strides = {strides.src1BlkStride, strides.src1RepStride};
  rec_sdk::emulator::run_vector(call);
}

template <typename T>
void with_scalar(const char* name, const Arithmetic& arithmetic, const LocalTensor<T>& dst,
                 const LocalTensor<T>& src, const T& scalar, int64_t count, uint8_t repeats = 1,
                 const UnaryRepeatParams& strides = {}) {
  rec_sdk::emulator::VectorCall call = vector_call(name, dst, count);
  call.function = arithmetic.function;
  call.saturating = arithmetic.saturating;
  call.a = &src.memory();
  call.src_bytes = sizeof(T);
  call.scalar = &scalar;
  call.repeats = repeats;
  call.dst_strides = {strides.dstBlkStride, strides.dstRepStride};
  call.a_strides = {strides.srcBlkStride, strides.srcRepStride};
  rec_sdk::emulator::run_vector(call);
}

#define REC_SDK_ONE_BINARY(Name, op, types, message)                                                     \
  template <typename T>                                                                                  \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,           \
            const int32_t& count) {                                                                      \
    static_assert(types<T>, message);                                                                    \
    if constexpr (types<T>) {                                                                            \
      constexpr Arithmetic arithmetic = binary_function<T, rec_sdk::emulator::BinaryOp::op>();           \
      binary(#Name, arithmetic, dst, src0, src1, count);                                                 \
    }                                                                                                    \
  }                                                                                                      \
  template <typename T, bool isSetMask = true>                                                           \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t, \
            const uint8_t repeatTime, const BinaryRepeatParams& repeatParams) {                          \
    static_assert(types<T>, message);                                                                    \
    static_assert(!isSetMask, #Name ": the emulator knows this call with isSetMask = false only");       \
    if constexpr (types<T>) {                                                                            \
      constexpr Arithmetic arithmetic = binary_function<T, rec_sdk::emulator::BinaryOp::op>();           \
      binary(#Name, arithmetic, dst, src0, src1, rec_sdk::emulator::kByMask, repeatTime, repeatParams);  \
    }                                                                                                    \
  }

// The count form with isSetMask = false does not compile, because 2201 uses the mask and 950 the count.
#define REC_SDK_ONE_WITH_SCALAR(Name, kind, Op, op, types, message)                                   \
  template <typename T, bool isSetMask = true>                                                        \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,               \
            const int32_t& count) {                                                                   \
    static_assert(types<T>, message);                                                                 \
    static_assert(isSetMask, #Name                                                                    \
                  ": with a count, isSetMask = false has no effect on 950, which computes that many " \
                  "elements; MASK_PLACEHOLDER and UnaryRepeatParams ask the mask on all chips");      \
    if constexpr (types<T>) {                                                                         \
      constexpr Arithmetic arithmetic = kind##_function<T, rec_sdk::emulator::Op::op>();              \
      with_scalar(#Name, arithmetic, dst, src, scalarValue, count);                                   \
    }                                                                                                 \
  }                                                                                                   \
  template <typename T, bool isSetMask = true>                                                        \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, uint64_t,     \
            const uint8_t repeatTime, const UnaryRepeatParams& repeatParams) {                        \
    static_assert(types<T>, message);                                                                 \
    static_assert(!isSetMask, #Name ": the emulator knows this call with isSetMask = false only");    \
    if constexpr (types<T>) {                                                                         \
      constexpr Arithmetic arithmetic = kind##_function<T, rec_sdk::emulator::Op::op>();              \
      with_scalar(#Name, arithmetic, dst, src, scalarValue, rec_sdk::emulator::kByMask, repeatTime,   \
                  repeatParams);                                                                      \
    }                                                                                                 \
  }

#define REC_SDK_ONE_ARITHMETIC(Name, op)                            \
  REC_SDK_ONE_WITH_SCALAR(Name, with_scalar, BinaryOp, op, kNumber, \
                          #Name ": half, float, int16_t and int32_t only; bfloat16_t must be cast to float")

// A right shift of a signed T shifts in copies of the sign bit.
#define REC_SDK_ONE_SHIFT(Name, op) \
  REC_SDK_ONE_WITH_SCALAR(Name, shift, ShiftOp, op, kShifted, #Name ": integers of 16 and 32 bits only")

#define REC_SDK_ONE_UNARY(Name)                                                                   \
  template <typename T>                                                                           \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count) {         \
    static_assert(kFloating<T>, #Name ": half and float only; bfloat16_t must be cast to float"); \
    rec_sdk::emulator::VectorCall call = vector_call(#Name, dst, count);                          \
    if constexpr (kFloating<T>) {                                                                 \
      call.function = rec_sdk::emulator::unary<rec_sdk::emulator::UnaryOp::k##Name, T>;           \
    }                                                                                             \
    call.a = &src.memory();                                                                       \
    call.src_bytes = sizeof(T);                                                                   \
    rec_sdk::emulator::run_vector(call);                                                          \
  }

REC_SDK_ONE_BINARY(Add, kAdd, kNumber,
                   "Add: half, float, int16_t and int32_t only; bfloat16_t must be cast to float")
REC_SDK_ONE_BINARY(Sub, kSub, kNumber,
                   "Sub: half, float, int16_t and int32_t only; bfloat16_t must be cast to float")
REC_SDK_ONE_BINARY(Mul, kMul, kNumber,
                   "Mul: half, float, int16_t and int32_t only; bfloat16_t must be cast to float")
REC_SDK_ONE_BINARY(Max, kMax, kNumber,
                   "Max: half, float, int16_t and int32_t only; bfloat16_t must be cast to float")
REC_SDK_ONE_BINARY(Min, kMin, kNumber,
                   "Min: half, float, int16_t and int32_t only; bfloat16_t must be cast to float")
REC_SDK_ONE_BINARY(Div, kDiv, kFloating, "Div: half and float only; integers must be cast to float")

REC_SDK_ONE_ARITHMETIC(Adds, kAdd)
REC_SDK_ONE_ARITHMETIC(Muls, kMul)
REC_SDK_ONE_ARITHMETIC(Maxs, kMax)
REC_SDK_ONE_ARITHMETIC(Mins, kMin)

REC_SDK_ONE_SHIFT(ShiftLeft, kLeft)
REC_SDK_ONE_SHIFT(ShiftRight, kRight)

REC_SDK_ONE_UNARY(Sqrt)
REC_SDK_ONE_UNARY(Rsqrt)
REC_SDK_ONE_UNARY(Exp)
REC_SDK_ONE_UNARY(Ln)
REC_SDK_ONE_UNARY(Abs)
REC_SDK_ONE_UNARY(Reciprocal)

#undef REC_SDK_ONE_BINARY
#undef REC_SDK_ONE_ARITHMETIC
#undef REC_SDK_ONE_WITH_SCALAR
#undef REC_SDK_ONE_SHIFT
#undef REC_SDK_ONE_UNARY

// Computes dst += src * scalar, with two roundings.
template <typename T, typename U>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, const int32_t& count) {
  constexpr bool kPair = (kOneOf<T, float> && kFloating<U>) || (kOneOf<T, half> && kOneOf<U, half>);
  static_assert(kPair, "Axpy: (half, half), (float, float) and (float, half) only");
  rec_sdk::emulator::VectorCall call = vector_call("Axpy", dst, count);
  if constexpr (kPair) {
    call.function = rec_sdk::emulator::axpy<T, U>;
  }
  call.a = &src.memory();
  call.src_bytes = sizeof(U);
  call.scalar = &scalarValue;
  call.reads_dst = true;
  rec_sdk::emulator::run_vector(call);
}

template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count) {
  static_assert(kOneOf<T, half, bfloat16_t, int16_t, uint16_t, int32_t, uint32_t, float>,
                "Duplicate: 16-bit and 32-bit types only");
  rec_sdk::emulator::VectorCall call{"Duplicate", nullptr, count, &dst.memory(), sizeof(T)};
  call.function =
      sizeof(T) == 2 ? rec_sdk::emulator::duplicate<uint16_t> : rec_sdk::emulator::duplicate<uint32_t>;
  call.scalar = &scalarValue;
  rec_sdk::emulator::run_vector(call);
}

// Computes dst[0] = the sum of src, added in pairs. On 2201 the scalar unit stores the sum, ordered by flags
// of the pipe.
template <typename T, bool isSetMask = true>
void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
               const int32_t count) {
  static_assert(kFloating<T>, "ReduceSum: half and float only; bfloat16_t must be cast to float");
  static_assert(isSetMask, "ReduceSum: the emulator knows it with isSetMask = true only");
  if constexpr (kFloating<T>) {
    rec_sdk::emulator::reduce(dst.memory(), src.memory(), sharedTmpBuffer.memory(), count, sizeof(T),
                              rec_sdk::emulator::reduce_sum<T>, saturate_function<T>());
  }
}

// Sets dst[i] to the element of src at offset srcBaseOffset + srcOffset[i], in bytes.
template <typename T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
            const uint32_t srcBaseOffset, const uint32_t count) {
  static_assert(kOneOf<T, half, bfloat16_t, uint16_t, int16_t, float, uint32_t, int32_t>,
                "Gather: 16-bit and 32-bit types only");
  rec_sdk::emulator::gather(dst.memory(), src.memory(), srcOffset.memory(), srcBaseOffset, count, sizeof(T));
}

}  // namespace AscendC
