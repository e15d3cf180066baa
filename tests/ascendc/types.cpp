// Kernels that must not compile, one for each value of REC_SDK_CASE. Case 0 has their repaired forms and must
// compile.
#include "kernel_operator.h"

using namespace AscendC;

template <class T>
LocalTensor<T> tensor() {
  static LocalMemAllocator<> allocator;
  return allocator.Alloc<T, 64>();
}

void kernel() {
#if REC_SDK_CASE == 0
  const auto floats = tensor<float>();
  Add(floats, floats, floats, 64);
  Div(floats, floats, floats, 64);
  Muls(floats, floats, 2.0f, 64);
  Muls<float, false>(floats, floats, 2.0f, MASK_PLACEHOLDER, 1, {1, 1, 8, 8});
  Axpy(floats, tensor<half>(), half(2.0f), 64);
  Cast(floats, tensor<bfloat16_t>(), RoundMode::CAST_NONE, 64);
  Duplicate(tensor<bfloat16_t>(), bfloat16_t(0.0f), 64);
  SetAtomicAdd<bfloat16_t>();
  PipeBarrier<PIPE_V>();
  TQue<TPosition::VECIN, 1> queue;
  const GlobalTensor<float> rows;
  DataCopyPad(floats, rows, {1, 256, 0, 0, 0}, {false, 0, 0, 0.0f});
#elif REC_SDK_CASE == 1
  Add(tensor<bfloat16_t>(), tensor<bfloat16_t>(), tensor<bfloat16_t>(), 64);
#elif REC_SDK_CASE == 2
  Muls(tensor<bfloat16_t>(), tensor<bfloat16_t>(), bfloat16_t(2.0f), 64);
#elif REC_SDK_CASE == 3
  Div(tensor<int32_t>(), tensor<int32_t>(), tensor<int32_t>(), 64);
#elif REC_SDK_CASE == 4
  Add(tensor<int64_t>(), tensor<int64_t>(), tensor<int64_t>(), 64);
#elif REC_SDK_CASE == 5
  SetAtomicAdd<int64_t>();
#elif REC_SDK_CASE == 6
  Scatter(tensor<float>(), tensor<float>(), tensor<uint32_t>(), 0u, 64u);
#elif REC_SDK_CASE == 7
  Cast(tensor<bfloat16_t>(), tensor<half>(), RoundMode::CAST_RINT, 64);
#elif REC_SDK_CASE == 8
  PipeBarrier<PIPE_S>();
#elif REC_SDK_CASE == 9
  TQue<TPosition::VECCALC, 1> queue;
#elif REC_SDK_CASE == 10
  Sqrt(tensor<bfloat16_t>(), tensor<bfloat16_t>(), 64);
#elif REC_SDK_CASE == 11
  Axpy(tensor<half>(), tensor<float>(), 2.0f, 64);
#elif REC_SDK_CASE == 12
  Duplicate(tensor<int64_t>(), int64_t{0}, 64);
#elif REC_SDK_CASE == 13
  ReduceSum(tensor<bfloat16_t>(), tensor<bfloat16_t>(), tensor<bfloat16_t>(), 64);
#elif REC_SDK_CASE == 14
  Exp(tensor<int32_t>(), tensor<int32_t>(), 64);
#elif REC_SDK_CASE == 15
  AtomicAdd(static_cast<float*>(nullptr), 1.0f);
#elif REC_SDK_CASE == 16
  TPipe pipe;
  TBuf<> buffer;
  pipe.InitBuffer(buffer, 2, 64);
#elif REC_SDK_CASE == 17
  SetSaturationFlag<SaturationMode::FLOAT>(false);
#elif REC_SDK_CASE == 18
  Muls<float, false>(tensor<float>(), tensor<float>(), 2.0f, 1);
#elif REC_SDK_CASE == 19
  Adds<int32_t, false>(tensor<int32_t>(), tensor<int32_t>(), 0, 1);
#endif
}
