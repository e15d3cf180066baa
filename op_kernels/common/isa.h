// One source, several instruction sets: the cpu.cpp files are compiled once for each, with REC_SDK_ISA naming
// the namespace. All inline functions that they use are in that namespace, so that the linker can never use a
// function compiled for AVX-512 in the code for a machine without AVX-512. For the same reason they use no
// std:: templates.
#pragma once

#ifndef REC_SDK_ISA
#define REC_SDK_ISA portable
#endif

#ifdef __CUDACC__
#define REC_SDK_HD __host__ __device__ __forceinline__
#elif defined(REC_SDK_CANN) || (defined(__NPU_ARCH__) && !defined(REC_SDK_ASCENDC_ARCH))
// This branch is for CANN's compiler, for the device or for the host, and not for the emulator. The functions
// are device-only, because they call operators of planes, which are device-only.
#include "kernel_operator.h"
#define REC_SDK_HD __aicore__ inline __attribute__((always_inline))
#else
#define REC_SDK_HD inline __attribute__((always_inline))
#endif

// GCC 12 deletes calls to helpers that only prefetch, unless they are always_inline.
#define REC_SDK_INLINE inline __attribute__((always_inline))
