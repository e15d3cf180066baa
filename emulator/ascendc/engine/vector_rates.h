// The speed of the vector unit: the theoretical throughput from CANN's documentation for A2 and A3 (an
// appendix of the API reference, "Vector指令理论性能汇总"). Nothing is published for the 950; the same
// numbers are used.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

// An instruction processes `elements` elements, or 256 bytes of its widest operand if that is 0, in `cycles`
// cycles.
struct VectorRate {
  const char* name;
  int64_t elements, cycles;
};

// ReduceSum has no rate of its own; it is one ReduceRepeat instruction, whose rate is used.
constexpr VectorRate kVectorRates[] = {
    {"Div", 32, 1}, {"Sqrt", 32, 1}, {"Exp", 32, 1}, {"Ln", 32, 1}, {"Gather", 5, 1}, {"ReduceSum", 0, 7},
};
constexpr VectorRate kUsualVectorRate = {"all others", 0, 1};

// element_bytes: bytes of an element of the widest operand.
int64_t vector_cycles(const char* name, int64_t count, int64_t element_bytes);

}  // namespace rec_sdk::emulator
