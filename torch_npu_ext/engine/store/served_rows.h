// Conversion of the rows of a served table to floats, with one class per format, and sums of rows that are
// added in the same order as in the operator lookup_pooled.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "op_kernels/common/aggregate.h"
#include "op_kernels/common/convert.h"
#include "torch_npu_ext/engine/store/serving.h"

namespace rec_sdk {

namespace kernels = REC_SDK_ISA;

// Rows in a floating-point format. For an id that is missing, row(nullptr, column) returns a row of default
// values.
template <class Format>
class FloatRows {
 public:
  using Stored = typename Format::Storage;
  struct __attribute__((packed)) Unaligned {  // rows may be unaligned in files that another program wrote
    Stored value;
  };
  struct Row {
    const Unaligned* __restrict data;
    REC_SDK_INLINE float operator[](int64_t k) const { return Format::load(data[k].value); }
  };

  FloatRows(int64_t dim, float missing) : missing_(static_cast<size_t>(dim), Format::store(missing)) {}
  REC_SDK_INLINE Row row(const char* at, int64_t column) const {
    const void* const row = at == nullptr ? static_cast<const void*>(missing_.data()) : at;
    return {static_cast<const Unaligned*>(row) + column};
  }

 private:
  std::vector<Stored> missing_;
};

struct ByteCodes {
  using Parameter = kernels::Float32;
  static constexpr int64_t bytes(int64_t dim) { return dim; }
  static REC_SDK_INLINE int32_t code(const uint8_t* codes, int64_t k) { return codes[k]; }
};

struct NibbleCodes {
  using Parameter = kernels::Float16;
  static constexpr int64_t bytes(int64_t dim) { return (dim + 1) / 2; }
  static REC_SDK_INLINE int32_t code(const uint8_t* codes, int64_t k) {
    return codes[k >> 1] >> ((k & 1) * 4) & 15;
  }
};

// Quantized rows: integer codes, a scale and a bias.
template <class Codes>
class QuantizedRows {
 public:
  struct Row {
    const uint8_t* __restrict codes;
    int64_t column;
    float scale, bias;
    REC_SDK_INLINE float operator[](int64_t k) const {
      return static_cast<float>(Codes::code(codes, column + k)) * scale + bias;
    }
  };

  QuantizedRows(int64_t dim, float missing)
      : bytes_(Codes::bytes(dim)), zeros_(static_cast<size_t>(bytes_)), missing_(missing) {}
  REC_SDK_INLINE Row row(const char* at, int64_t column) const {
    if (at == nullptr) return {zeros_.data(), column, 0.0f, missing_};
    typename Codes::Parameter::Storage parameters[2];
    std::memcpy(parameters, at + bytes_, sizeof parameters);
    return {reinterpret_cast<const uint8_t*>(at), column, Codes::Parameter::load(parameters[0]),
            Codes::Parameter::load(parameters[1])};
  }

 private:
  int64_t bytes_;
  std::vector<uint8_t> zeros_;
  float missing_;
};

// Calls f with an object that reads rows in the format.
template <class F>
void with_rows(RowFormat format, int64_t dim, float missing, const F& f) {
  switch (format) {
    case RowFormat::kFloat32:
      return f(FloatRows<kernels::Float32>(dim, missing));
    case RowFormat::kFloat16:
      return f(FloatRows<kernels::Float16>(dim, missing));
    case RowFormat::kBFloat16:
      return f(FloatRows<kernels::BFloat16>(dim, missing));
    case RowFormat::kInt8:
      return f(QuantizedRows<ByteCodes>(dim, missing));
    case RowFormat::kInt4:
      return f(QuantizedRows<NibbleCodes>(dim, missing));
  }
}

// The terms of a sum: the rows of lookups, multiplied by the weights of the lookups if kWeighted.
template <class Rows, bool kWeighted>
struct ServedTerms {
  const Rows& stored;
  const char* const* rows;  // the rows of the lookups, from lookup `low` on
  const float* weights;
  int64_t low;

  struct Row {
    typename Rows::Row values;
    float weight;
    REC_SDK_INLINE float operator[](int64_t k) const { return kWeighted ? weight * values[k] : values[k]; }
  };
  REC_SDK_INLINE Row row(int64_t j, int64_t column) const {
    return {stored.row(rows[j - low], column), kWeighted ? weights[j] : 1.0f};
  }
  REC_SDK_INLINE void prefetch(int64_t) const {}  // nothing to do: each_block() has prefetched the rows
};

// Computes the sums or means of bags [from, to). `rows` contains the rows of the lookups of these bags.
template <class Rows>
void pool_bags(const BagLookups& lookups, const Rows& stored, const char* const* rows, int64_t from,
               int64_t to, int64_t dim, float* out) {
  const int64_t low = lookups.offsets[from];
  const auto pooled = [&](const auto& terms, auto fixed) {
    for (int64_t bag = from; bag < to; ++bag) {
      const int64_t first = lookups.offsets[bag], last = lookups.offsets[bag + 1];
      float* __restrict sums = out + bag * dim;
      if (first == last) {
        for (int64_t k = 0; k < dim; ++k) sums[k] = 0;
        continue;
      }
      kernels::pairwise_sum<decltype(fixed)::value>(terms, first, last, dim, sums);
      if (lookups.mean) {
        const float length = static_cast<float>(last - first);
        for (int64_t k = 0; k < dim; ++k) sums[k] /= length;
      }
    }
  };
  kernels::with_dim(dim, [&](auto fixed) {
    if (lookups.weights != nullptr) {
      pooled(ServedTerms<Rows, true>{stored, rows, lookups.weights, low}, fixed);
    } else {
      pooled(ServedTerms<Rows, false>{stored, rows, nullptr, low}, fixed);
    }
  });
}

}  // namespace rec_sdk
