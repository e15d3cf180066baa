// Admission by chance: the coin of an id in a batch. It is a function of the table, the id and the number of
// the batch, so that a batch which is planned again has the same coins, and nothing is counted.
#pragma once

#include <cstdint>
#include <string>

#include "torch_npu_ext/engine/base/id_hash.h"
#include "torch_npu_ext/engine/base/philox.h"

namespace rec_sdk {

class Coin {
 public:
  Coin(uint64_t seed, const std::string& table) {
    uint64_t name = 0xCBF29CE484222325ull;  // FNV-1a
    for (const char byte : table) name = (name ^ static_cast<uint8_t>(byte)) * 0x100000001B3ull;
    key_ = IdSeed::fold(seed ^ name, 0x9E3779B97F4A7C15ull);
  }

  // True with this probability, 0 to 1.
  bool toss(int64_t id, uint64_t batch, double probability) const {
    const uint64_t bits = static_cast<uint64_t>(id);
    const auto drawn = philox4x32({low(bits), high(bits), low(batch), high(batch)}, {low(key_), high(key_)});
    const int64_t number = static_cast<int64_t>((static_cast<uint64_t>(drawn[0]) << 32 | drawn[1]) >> 11);
    return static_cast<double>(number) < probability * kNumbers;  // both are exact
  }

 private:
  static constexpr double kNumbers = uint64_t{1} << 53;

  static uint32_t low(uint64_t bits) { return static_cast<uint32_t>(bits); }
  static uint32_t high(uint64_t bits) { return static_cast<uint32_t>(bits >> 32); }

  uint64_t key_;
};

}  // namespace rec_sdk
