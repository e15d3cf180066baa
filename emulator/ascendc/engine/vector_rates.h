// The speed of the vector unit: the theoretical throughput of A2 and A3 according to CANN's documentation (an
// appendix of the API reference, "Vector指令理论性能汇总"). For the 950 nothing is published, so the same
// numbers are used.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

// The rate of an instruction: it processes `elements` elements in `cycles` cycles. If `elements` is 0, it
// processes 256 bytes of its widest operand.
struct VectorRate {
  const char* name;
  int64_t elements, cycles;
};

// For ReduceSum no rate is documented. It is one ReduceRepeat instruction, so that rate is used.
constexpr VectorRate kVectorRates[] = {
    {"Div", 32, 1}, {"Sqrt", 32, 1}, {"Exp", 32, 1}, {"Ln", 32, 1}, {"Gather", 5, 1}, {"ReduceSum", 0, 7},
};
constexpr VectorRate kUsualVectorRate = {"all others", 0, 1};

// Returns the number of cycles of an instruction on `count` elements. element_bytes is the size of an element
// of the widest operand.
int64_t vector_cycles(const char* name, int64_t count, int64_t element_bytes);

}  // namespace rec_sdk::emulator
