// Exponential decay with a half-life in batches. The decay is a product of repeated square roots of 1/2,
// because sqrt(), unlike pow(), is rounded identically on every machine. A value is multiplied by one factor
// after another, so results are bit-identical whether the factors are tabulated or computed.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace rec_sdk {

// Exponential decay: a value halves every `half_life` batches.
class HalfLife {
 public:
  explicit HalfLife(int64_t half_life) : half_life_(half_life) {  // 0: no decay
    if (half_life == 0) return;
    known_.resize(kKnown);
    for (uint32_t batches = 0; batches < kKnown; ++batches) known_[batches] = steps(batches);
  }

  // Precondition: half_life > 0.
  double decayed(double value, uint32_t batches) const {
    const Steps found = batches < kKnown ? known_[batches] : steps(batches);
    for (const double factor : found.factors) value *= factor;
    return found.scale != 0 ? value * found.scale : std::ldexp(value, -halvings(batches));
  }

 private:
  static constexpr uint32_t kKnown =
      1024;  // numbers of batches with tabulated factors; most rows have been idle for fewer batches
  static constexpr int kBits = 8, kDigits = 7;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits * kDigits) - 1;
  static constexpr int64_t kMostHalvings = 3000;  // with more halvings, every double becomes 0
  static constexpr int kMostScaled = 1000;        // with more halvings, 2 ^ -halvings may be subnormal
  struct Steps {                                  // one cache line
    double factors[kDigits];
    double scale;  // 2 ^ -halvings; 0 for more than kMostScaled halvings
  };
  using Factors = std::array<std::array<double, 1 << kBits>, kDigits>;

  Steps steps(uint32_t batches) const {
    Steps result;
    uint64_t part = fraction(batches % half_life_, half_life_);
    for (size_t digit = 0; digit < kDigits; ++digit, part = part << kBits & kMask) {
      result.factors[digit] = factors()[digit][part >> (kDigits - 1) * kBits];
    }
    result.scale = halvings(batches) > kMostScaled ? 0 : std::ldexp(1.0, -halvings(batches));
    return result;
  }
  int halvings(uint32_t batches) const {
    return static_cast<int>(std::min(batches / half_life_, kMostHalvings));
  }

  // Returns batches / half_life, which is below 1, as a fixed-point number of kBits * kDigits binary digits.
  static uint64_t fraction(int64_t batches, int64_t half_life) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(batches) << kBits * kDigits) /
                                 static_cast<uint64_t>(half_life));
  }

  // Returns the table [digit][k] = 2 ^ -(k / 256 ^ (digit + 1)).
  static const Factors& factors() {
    static const Factors all = [] {
      Factors table;
      double root = 0.5;
      for (auto& of_digit : table) {
        std::array<double, kBits> of_bit;  // the highest bit first
        for (double& factor : of_bit) factor = root = std::sqrt(root);
        for (size_t k = 0; k < of_digit.size(); ++k) {
          of_digit[k] = 1;
          for (size_t bit = 0; bit < of_bit.size(); ++bit) {
            if ((k >> (kBits - 1 - bit) & 1) != 0) of_digit[k] *= of_bit[bit];
          }
        }
      }
      return table;
    }();
    return all;
  }

  int64_t half_life_;
  std::vector<Steps> known_;  // indexed by batches
};

}  // namespace rec_sdk
