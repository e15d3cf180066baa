// How fast the vector unit computes: the theoretical throughput that CANN's documentation gives for A2 and A3
// (an appendix of the API reference, "Vector指令理论性能汇总"). For the 950 nothing is published; the same
// numbers stand in.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

// An instruction takes `elements` of them, or 256 bytes of its widest operand where that is 0, in `cycles`.
struct VectorRate {
  const char* name;
  int64_t elements, cycles;
};

// ReduceSum has no rate of its own; it is one instruction ReduceRepeat, whose rate this is.
constexpr VectorRate kVectorRates[] = {
    {"Div", 32, 1}, {"Sqrt", 32, 1}, {"Exp", 32, 1}, {"Ln", 32, 1}, {"Gather", 5, 1}, {"ReduceSum", 0, 7},
};
constexpr VectorRate kUsualVectorRate = {"all others", 0, 1};

// element_bytes: of the widest operand.
int64_t vector_cycles(const char* name, int64_t count, int64_t element_bytes);

}  // namespace rec_sdk::emulator
