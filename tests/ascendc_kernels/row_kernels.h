// Functions that return the kernel of a lookup or a copy, with its name and buffers, for the kernel's
// arguments.
#pragma once

#include "emulator/kernels/lookup_buffers.h"
#include "op_kernels/gather_rows/ascendc.h"
#include "op_kernels/lookup_pooled/ascendc.h"
#include "op_kernels/lookup_sequence/ascendc.h"
#include "op_kernels/pooled_weights_grad/ascendc.h"
#include "op_kernels/scatter_rows/ascendc.h"
#include "op_kernels/swap_lookup_pooled/ascendc.h"
#include "op_kernels/swap_lookup_sequence/ascendc.h"
#include "op_kernels/swap_rows/ascendc.h"
#include "tests/ascendc_kernels/support.h"

namespace ascendc_tests {

struct Kernel {
  const char* name;
  rec_sdk::emulator::Buffers buffers;
  std::function<void()> body;

  // Runs the kernel. Error messages name it, preceded by `title` if that is not empty.
  void run(int64_t cores, const std::string& title = "") const {
    ascendc_tests::run(title.empty() ? name : title + ": " + name, cores, buffers, body);
  }
};

using rec_sdk::emulator::buffers_of;

inline Kernel kernel_of(const rec_sdk::LookupSequence& a) {
  return {"lookup_sequence", buffers_of(a), [a] { rec_sdk::ascendc::lookup_sequence(a); }};
}
inline Kernel kernel_of(const rec_sdk::LookupPooled& a) {
  return {"lookup_pooled", buffers_of(a), [a] { rec_sdk::ascendc::lookup_pooled(a); }};
}
inline Kernel kernel_of(const rec_sdk::PooledWeightsGrad& a) {
  return {"pooled_weights_grad", buffers_of(a), [a] { rec_sdk::ascendc::pooled_weights_grad(a); }};
}
inline Kernel kernel_of(const rec_sdk::SwapRows& a) {
  return {"swap_rows", buffers_of(a), [a] { rec_sdk::ascendc::swap_rows(a); }};
}
inline Kernel kernel_of(const rec_sdk::SwapLookupSequence& a) {
  return {"swap_lookup_sequence", buffers_of(a), [a] { rec_sdk::ascendc::swap_lookup_sequence(a); }};
}
inline Kernel kernel_of(const rec_sdk::SwapLookupPooled& a) {
  return {"swap_lookup_pooled", buffers_of(a), [a] { rec_sdk::ascendc::swap_lookup_pooled(a); }};
}
inline Kernel gather(const rec_sdk::CopyRows& a) {
  return {"gather_rows", rec_sdk::emulator::gather_buffers(a), [a] { rec_sdk::ascendc::gather_rows(a); }};
}
inline Kernel scatter(const rec_sdk::CopyRows& a) {
  return {"scatter_rows", rec_sdk::emulator::scatter_buffers(a), [a] { rec_sdk::ascendc::scatter_rows(a); }};
}

}  // namespace ascendc_tests
