#include "emulator/ascendc/engine/vector_rates.h"

#include <cstring>

namespace rec_sdk::emulator {
namespace {

const VectorRate& rate_of(const char* name) {
  for (const VectorRate& rate : kVectorRates) {
    // The first letter is compared first, because it differs for nearly all names.
    if (rate.name[0] == name[0] && std::strcmp(rate.name, name) == 0) {
      return rate;
    }
  }
  return kUsualVectorRate;
}

}  // namespace

int64_t vector_cycles(const char* name, int64_t count, int64_t element_bytes) {
  constexpr int64_t kRepeatBytes = 256;
  const VectorRate& rate = rate_of(name);
  if (rate.elements > 0) {
    return (count * rate.cycles + rate.elements - 1) / rate.elements;
  }
  return (count * element_bytes * rate.cycles + kRepeatBytes - 1) / kRepeatBytes;
}

}  // namespace rec_sdk::emulator
