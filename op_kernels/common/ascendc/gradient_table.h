// The table of gradients in GM, which the scalar unit reads. It comes there as parameters of a launch of its
// own: nobody waits, and the host's copy may go.
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

constexpr int64_t kGradientWords = sizeof(Gradient) / sizeof(int32_t);

// By one core.
__aicore__ inline void write_gradient_table(TPipe* pipe, const GradientTablePart& part) {
  Scratch buffer;
  pipe->InitBuffer(buffer, GradientTablePart::kMost * sizeof(Gradient));
  const LocalTensor<int32_t> words = buffer.Get<int32_t>();
  uint32_t at = 0;
  const auto put = [&](int64_t value) {
    words.SetValue(at++, static_cast<int32_t>(value));  // the lower half first
    words.SetValue(at++, static_cast<int32_t>(value >> 32));
  };
  for (int64_t i = 0; i < part.count; ++i) {
    const Gradient& grad = part.grads[i];
    put(reinterpret_cast<int64_t>(grad.data));
    put(grad.stride);
    put(grad.rows);
    put(grad.columns);
  }
  Signal<HardEvent::S_MTE3> written;
  written.init(pipe);
  written.order();
  store(reinterpret_cast<const int32_t*>(part.to), words, part.count * kGradientWords);
}

// The address of a row of gradient `source` of the table.
__aicore__ inline const float* row_of_gradient(const Lookups& lookups, int64_t source, int64_t row) {
  const auto* table = reinterpret_cast<const int64_t*>(lookups.grads);
  constexpr int64_t kValues = sizeof(Gradient) / sizeof(int64_t);
  const GlobalTensor<int64_t> values = global(table, lookups.grad_count * kValues);
  const int64_t data = values.GetValue(static_cast<uint64_t>(source * kValues));
  const int64_t stride = values.GetValue(static_cast<uint64_t>(source * kValues + 1));
  return reinterpret_cast<const float*>(data) + row * stride;
}

}  // namespace ascendc
}  // namespace rec_sdk
