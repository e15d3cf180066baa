// Loads and stores of neighbouring columns of a row: kVector columns at once if the address is aligned for
// them, else one at a time. kVector is 4 for every format. Outputs and gradients are fp32, so neighbouring
// threads access consecutive 16-byte words of them, without gaps.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "op_kernels/common/arguments.h"
#include "op_kernels/common/convert.h"
#include "op_kernels/common/isa.h"

namespace rec_sdk {
namespace cuda {

constexpr int kVector = 4;

template <int kSize>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = uint8_t;
};
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

// The type of one access of kSize bytes.
template <int kSize>
using Word = typename WordOf<kSize>::Type;

template <class Format, int N>
constexpr int kBytes = N * static_cast<int>(sizeof(typename Format::Storage));

REC_SDK_HD bool is_multiple(const void* address, int bytes) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<unsigned>(bytes) == 0;
}

// Returns whether all rows can be read kVector columns at a time.
template <class Format>
bool in_vectors(const Weights& weights) {
  constexpr int kAlignment = kBytes<Format, kVector>;
  return weights.dim % kVector == 0 && weights.stride_bytes % kAlignment == 0 &&
         is_multiple(weights.data, kAlignment);
}

template <class Format>
__device__ __forceinline__ const typename Format::Storage* row_of(const Weights& weights, int32_t slot) {
  return reinterpret_cast<const typename Format::Storage*>(weights.data + slot * weights.stride_bytes);
}

// N neighbouring columns as fp32.
template <int N>
struct alignas(4 * N) Columns {
  float value[N];

  __device__ __forceinline__ float& operator[](int k) { return value[k]; }
  __device__ __forceinline__ const float& operator[](int k) const { return value[k]; }

  __device__ __forceinline__ void operator+=(const Columns& other) {
#pragma unroll
    for (int k = 0; k < N; ++k) value[k] += other[k];
  }
};

// N neighbouring columns in their storage format, which are kept in registers while a load is in flight.
template <class Format, int N>
struct Packed {
  using Storage = typename Format::Storage;
  Word<kBytes<Format, N>> word;

  __device__ __forceinline__ Columns<N> unpack() const {
    Storage stored[N];
    memcpy(stored, &word, sizeof(stored));
    Columns<N> columns;
#pragma unroll
    for (int k = 0; k < N; ++k) columns[k] = Format::load(stored[k]);
    return columns;
  }

  static __device__ __forceinline__ Packed pack(const Columns<N>& columns) {
    Storage stored[N];
#pragma unroll
    for (int k = 0; k < N; ++k) stored[k] = Format::store(columns[k]);
    Packed packed;
    memcpy(&packed.word, stored, sizeof(stored));
    return packed;
  }
};

// Loads columns from memory that the kernel does not write, so the compiler may move the load before stores.
// `from` must be aligned to the size of N columns.
template <class Format, int N>
__device__ __forceinline__ Packed<Format, N> load_constant(const typename Format::Storage* from) {
  return {__ldg(reinterpret_cast<const Word<kBytes<Format, N>>*>(from))};
}

// Loads columns from memory that this thread may write later.
template <class Format, int N>
__device__ __forceinline__ Packed<Format, N> load(const typename Format::Storage* from) {
  return {*reinterpret_cast<const Word<kBytes<Format, N>>*>(from)};
}

template <class Format, int N>
__device__ __forceinline__ void store(typename Format::Storage* to, const Columns<N>& columns) {
  *reinterpret_cast<Word<kBytes<Format, N>>*>(to) = Packed<Format, N>::pack(columns).word;
}

// Stores results that are not read soon, with a hint to the caches to evict them first.
template <class Format, int N>
__device__ __forceinline__ void store_streaming(typename Format::Storage* to, const Columns<N>& columns) {
  __stcs(reinterpret_cast<Word<kBytes<Format, N>>*>(to), Packed<Format, N>::pack(columns).word);
}

// Loads fp32 values whose alignment is known only from the values of the arguments, such as a column slice.
template <int N>
__device__ __forceinline__ Columns<N> load_constant_anywhere(const float* from) {
  using Float32 = REC_SDK_ISA::Float32;
  if (is_multiple(from, kBytes<Float32, N>)) return load_constant<Float32, N>(from).unpack();
  Columns<N> columns;
#pragma unroll
  for (int k = 0; k < N; ++k) columns[k] = __ldg(from + k);
  return columns;
}

// Stores columns at any address. The vector store uses __stcg, because nvcc would split a plain vector store
// to merge it with the stores of single columns.
template <int N>
__device__ __forceinline__ void store_anywhere(float* to, const Columns<N>& columns) {
  using Float32 = REC_SDK_ISA::Float32;
  constexpr int kSize = kBytes<Float32, N>;
  if (is_multiple(to, kSize)) {
    __stcg(reinterpret_cast<Word<kSize>*>(to), Packed<Float32, N>::pack(columns).word);
    return;
  }
#pragma unroll
  for (int k = 0; k < N; ++k) __stcg(to + k, columns[k]);
}

}  // namespace cuda
}  // namespace rec_sdk
