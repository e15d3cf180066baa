#include "emulator/ascendc/engine/vector_rates.h"

#include <cstring>

namespace rec_sdk::emulator {
namespace {

const VectorRate& rate_of(const char* name) {
  for (const VectorRate& rate : kVectorRates) {
    if (std::strcmp(rate.name, name) == 0) {
      return rate;
    }
  }
  return kUsualVectorRate;
}

}  // namespace

int64_t vector_cycles(const char* name, int64_t count, int64_t element_bytes) {
  constexpr int64_t kRepeatBytes = 256;
  const VectorRate& rate = rate_of(name);
  const int64_t elements = rate.elements > 0 ? rate.elements : kRepeatBytes / element_bytes;
  return (count * rate.cycles + elements - 1) / elements;
}

}  // namespace rec_sdk::emulator
