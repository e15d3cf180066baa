// The row record: a row's weight and optimizer states, as contiguous bytes. The layout is the same in the
// host store, the staging buffers and the device cache, and on every backend.
#pragma once

#include <cstdint>

namespace rec_sdk {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// The maximum number of elements of a weight or a state. It is small enough that sizes computed from it fit
// in 64 bits.
constexpr int64_t kMaxDim = int64_t{1} << 30;
constexpr int64_t kMaxStates = 4;
constexpr int64_t kStateAlignment = 4;
constexpr int64_t kRecordAlignment = 16;

constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Layout of a record: the weight at offset 0, then one block per optimizer state, each with its own dtype.
struct RecordLayout {
  int64_t dim;
  DType weight_dtype;
  int64_t weight_bytes;
  int64_t state_count;
  int64_t state_elements[kMaxStates];  // dim, or 1 for a row-wise state
  int64_t state_offset[kMaxStates];    // bytes from the start of the record
  DType state_dtype[kMaxStates];
  int64_t bytes;  // of the whole record

  constexpr int64_t state_bytes(int64_t s) const { return state_elements[s] * dtype_bytes(state_dtype[s]); }
  // Returns whether all states are float32. Kernels update such states in place, without conversion.
  constexpr bool plain_states() const {
    for (int64_t s = 0; s < state_count; ++s) {
      if (state_dtype[s] != DType::kFloat32) return false;
    }
    return true;
  }
};

// Computes the layout of a record. Preconditions: 1 <= dim <= kMaxDim, 0 <= state_count <= kMaxStates, 0 <=
// state_elements[s] <= kMaxDim. state_elements may be null if state_count is 0; state_dtypes may be null if
// all states are float32.
constexpr RecordLayout make_record_layout(int64_t dim, DType weight_dtype, const int64_t* state_elements,
                                          int64_t state_count, const DType* state_dtypes = nullptr) {
  RecordLayout layout{};
  layout.dim = dim;
  layout.weight_dtype = weight_dtype;
  layout.weight_bytes = dim * dtype_bytes(weight_dtype);
  layout.state_count = state_count;
  int64_t end = layout.weight_bytes;
  for (int64_t s = 0; s < state_count; ++s) {
    layout.state_elements[s] = state_elements[s];
    layout.state_dtype[s] = state_dtypes != nullptr ? state_dtypes[s] : DType::kFloat32;
    layout.state_offset[s] = round_up(end, kStateAlignment);
    end = layout.state_offset[s] + layout.state_bytes(s);
  }
  layout.bytes = round_up(end, kRecordAlignment);
  return layout;
}

}  // namespace rec_sdk
