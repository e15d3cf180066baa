// Functions for all kernel tests: inputs that are equal on every machine, checksums of results that can be
// compared between machines, and decoding of weights to double, independently of the kernels.
#pragma once

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "op_kernels/common/cpu_kernels.h"
#include "op_kernels/common/record.h"
#include "tests/engine/check.h"

namespace kernel_tests {

using rec_sdk::CpuKernels;
using rec_sdk::DType;
using rec_sdk::RecordLayout;

constexpr int64_t kDims[] = {1, 3, 8, 20, 64, 130};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// The relative error of a float sum: terms are summed in blocks of 32 and the blocks pairwise, so each term
// takes part in fewer than 64 roundings.
constexpr double kSumError = 64 * 0x1p-24;

inline const char* name_of(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kFloat16 ? "float16" : "bfloat16";
}

// Random numbers by splitmix64, because the distributions of <random> differ between standard libraries.
class Random {
 public:
  explicit Random(int64_t seed) : state_(static_cast<uint64_t>(seed)) {}

  uint64_t bits() {
    uint64_t x = state_ += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }
  int32_t below(int64_t n) { return static_cast<int32_t>((bits() >> 32) % static_cast<uint64_t>(n)); }
  // Returns a number in [-1, 1), a multiple of 2^-23.
  float unit() { return static_cast<float>(static_cast<int64_t>(bits() >> 40) - (1 << 23)) * 0x1p-23f; }

 private:
  uint64_t state_;
};

inline std::vector<float> random_floats(Random* random, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = random->unit();
  return values;
}

class Checksum {  // FNV-1a
 public:
  template <class T>
  void add(const std::vector<T>& values) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); ++i) hash_ = (hash_ ^ bytes[i]) * 0x100000001B3ull;
  }
  uint64_t value() const { return hash_; }
  void print(const std::string& name) const { std::printf("%016" PRIx64 " %s\n", hash_, name.c_str()); }

 private:
  uint64_t hash_ = 0xCBF29CE484222325ull;
};

// Calls run(kernels, &checksum) for each instruction set of this machine, and checks that all checksums are
// equal.
template <class Run>
void same_bits(const std::string& name, const Run& run) {
  CHECK(rec_sdk::select_cpu_isa("baseline"));
  Checksum expected;
  run(rec_sdk::cpu_kernels(), &expected);
  for (const char* isa : {"x86_64_v3", "x86_64_v4"}) {
    if (!rec_sdk::select_cpu_isa(isa)) continue;
    Checksum found;
    run(rec_sdk::cpu_kernels(), &found);
    CHECK(found.value() == expected.value());
  }
  expected.print(name);
}

// Calls f(begin, end) for ranges that cover [0, count). The last range is first, an order that threads may
// have too.
template <class F>
void in_ranges(int64_t count, const F& f) {
  const int64_t size = count / 3 + 1;
  for (int64_t end = count; end > 0; end -= std::min(end, size)) f(std::max<int64_t>(0, end - size), end);
}

inline double value_of(uint16_t bits, DType dtype) {
  const bool half = dtype == DType::kFloat16;
  const int mantissa_bits = half ? 10 : 7, bias = half ? 15 : 127, specials = half ? 31 : 255;
  const int exponent = (bits & 0x7fff) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  double magnitude = std::ldexp(mantissa + (exponent > 0 ? 1 << mantissa_bits : 0),
                                std::max(exponent, 1) - bias - mantissa_bits);
  if (exponent == specials) magnitude = mantissa != 0 ? NAN : HUGE_VAL;
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

template <class T>
T read(const uint8_t* from, int64_t index) {
  T value;
  std::memcpy(&value, from + index * static_cast<int64_t>(sizeof value), sizeof value);
  return value;
}

// Returns element k of a row of weights or of a block of states.
inline double element_of(const uint8_t* row, int64_t k, DType dtype) {
  return dtype == DType::kFloat32 ? static_cast<double>(read<float>(row, k))
                                  : value_of(read<uint16_t>(row, k), dtype);
}

template <class T>
void write(uint8_t* to, int64_t index, T value) {
  std::memcpy(to + index * static_cast<int64_t>(sizeof value), &value, sizeof value);
}

enum class States { kFloats, kMixed };

// Row records with random weights in (-2, 2) and states in [0.5, 1.5). With kMixed, the states have all data
// types in turn.
struct Cache {
  RecordLayout layout;
  int64_t slots;
  std::vector<uint8_t> bytes;

  Cache(Random* random, int64_t slot_count, int64_t dim, DType dtype, const std::vector<int64_t>& states,
        States types = States::kFloats)
      : layout(layout_of(dim, dtype, states, types)),
        slots(slot_count),
        bytes(static_cast<size_t>(slot_count * layout.bytes)) {
    for (int64_t s = 0; s < slots; ++s) fill(random, record(s));
  }

  uint8_t* record(int64_t slot) { return bytes.data() + slot * layout.bytes; }
  const uint8_t* record(int64_t slot) const { return bytes.data() + slot * layout.bytes; }
  double weight(int64_t slot, int64_t k) const { return element_of(record(slot), k, layout.weight_dtype); }
  double state(int64_t slot, int64_t s, int64_t k) const {
    return element_of(record(slot) + layout.state_offset[s], k, layout.state_dtype[s]);
  }
  rec_sdk::Weights weights() const {
    return {bytes.data(), layout.bytes, slots, layout.dim, layout.weight_dtype};
  }

 private:
  // Mixed states begin with a data type that depends on the weights' type, so that each optimizer is tested
  // with more combinations.
  static RecordLayout layout_of(int64_t dim, DType dtype, const std::vector<int64_t>& states, States types) {
    constexpr DType kTurn[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
    DType dtypes[rec_sdk::kMaxStates] = {};
    for (size_t s = 0; types == States::kMixed && s < states.size(); ++s) {
      dtypes[s] = kTurn[(s + (dtype == DType::kFloat16 ? 1 : 0)) % 3];
    }
    return rec_sdk::make_record_layout(dim, dtype, states.data(), static_cast<int64_t>(states.size()),
                                       dtypes);
  }

  void fill(Random* random, uint8_t* to) const {
    for (int64_t k = 0; k < layout.dim; ++k) {
      const auto bits = static_cast<uint16_t>(random->bits());
      if (layout.weight_dtype == DType::kFloat32) {
        write(to, k, 2 * random->unit());
      } else if (layout.weight_dtype == DType::kFloat16) {
        write(to, k, static_cast<uint16_t>(bits & 0xbfff));  // includes subnormal numbers
      } else {
        write(to, k, static_cast<uint16_t>((bits & 0x83ff) | 0x3c00));
      }
    }
    for (int64_t s = 0; s < layout.state_count; ++s) {
      for (int64_t k = 0; k < layout.state_elements[s]; ++k) fill_state(random, s, to, k);
    }
  }

  void fill_state(Random* random, int64_t s, uint8_t* to, int64_t k) const {
    to += layout.state_offset[s];
    const auto bits = static_cast<uint16_t>(random->bits());
    if (layout.state_dtype[s] == DType::kFloat32) {
      write(to, k, 1 + random->unit() / 2);
    } else if (layout.state_dtype[s] == DType::kFloat16) {
      write(to, k, static_cast<uint16_t>((bits & 0x3ff) | 0x3800));
    } else {
      write(to, k, static_cast<uint16_t>((bits & 0x7f) | 0x3f00));
    }
  }
};

}  // namespace kernel_tests
