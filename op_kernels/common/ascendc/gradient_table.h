// The table of gradients in GM, which the scalar unit reads. A separate launch receives it as parameters and
// writes it. So the host does not wait for a copy and may free its own table.
#pragma once

#include "op_kernels/common/ascendc/signal.h"

namespace rec_sdk {
namespace ascendc {

struct GradientTablePart {
  static constexpr int64_t kMost = 16;  // half a KB of parameters
  Gradient grads[kMost];
  int64_t count;
  Gradient* to;
};

constexpr int64_t kGradientValues = sizeof(Gradient) / sizeof(int64_t);

// Writes a 64-bit value as two words, the low word first.
__aicore__ inline void put_value(const LocalTensor<int32_t>& words, int64_t at, int64_t value) {
  words.SetValue(static_cast<uint32_t>(2 * at), static_cast<int32_t>(value));
  words.SetValue(static_cast<uint32_t>(2 * at + 1), static_cast<int32_t>(value >> 32));
}

// Writes a part of the table to GM. Executed by one core.
__aicore__ inline void write_gradient_table(TPipe* pipe, const GradientTablePart& part) {
  Landing buffer;
  pipe->InitBuffer(buffer, GradientTablePart::kMost * sizeof(Gradient));
  const LocalTensor<int32_t> words = buffer.Get<int32_t>();
  for (int64_t i = 0; i < part.count; ++i) {
    const Gradient& grad = part.grads[i];
    put_value(words, kGradientValues * i, reinterpret_cast<int64_t>(grad.data));
    put_value(words, kGradientValues * i + 1, grad.stride);
    put_value(words, kGradientValues * i + 2, grad.rows);
    put_value(words, kGradientValues * i + 3, grad.columns);
  }
  Signal<HardEvent::S_MTE3> written;
  written.init(pipe);
  written.order();
  store(reinterpret_cast<const int32_t*>(part.to), words, part.count * kGradientValues * 2);
}

// Returns the address of a row of gradient `source` of the table.
__aicore__ inline const float* row_of_gradient(const Lookups& lookups, int64_t source, int64_t row) {
  const auto* table = reinterpret_cast<const int64_t*>(lookups.grads);
  const GlobalTensor<int64_t> values = global(table, lookups.grad_count * kGradientValues);
  const int64_t data = values.GetValue(static_cast<uint64_t>(source * kGradientValues));
  const int64_t stride = values.GetValue(static_cast<uint64_t>(source * kGradientValues + 1));
  return reinterpret_cast<const float*>(data) + row * stride;
}

}  // namespace ascendc
}  // namespace rec_sdk
