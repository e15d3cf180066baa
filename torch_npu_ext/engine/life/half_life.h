// Counts that decay: half of them is left after so many batches. The factor is a product of square roots of
// square roots of 1/2, which are rounded alike on every machine, where a power is not.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace rec_sdk {

class HalfLife {
 public:
  // Precondition: half_life > 0.
  static double decayed(double value, uint32_t batches, int64_t half_life) {
    const int64_t halvings = batches / half_life;
    uint64_t part = fraction(batches % half_life, half_life);
    for (int digit = 0; part != 0; ++digit, part = part << kBits & kMask) {
      value *= factors()[static_cast<size_t>(digit)][part >> (kDigits - 1) * kBits];
    }
    return std::ldexp(value, -static_cast<int>(halvings < kMostHalvings ? halvings : kMostHalvings));
  }

 private:
  static constexpr int kBits = 8, kDigits = 7;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits * kDigits) - 1;
  static constexpr int64_t kMostHalvings = 3000;  // which leave nothing of any double
  using Factors = std::array<std::array<double, 1 << kBits>, kDigits>;

  // batches / half_life, below 1, in binary digits behind the point.
  static uint64_t fraction(int64_t batches, int64_t half_life) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(batches) << kBits * kDigits) /
                                 static_cast<uint64_t>(half_life));
  }

  // [digit][k]: 2 ^ -(k / 256 ^ (digit + 1)).
  static const Factors& factors() {
    static const Factors all = [] {
      Factors made;
      double root = 0.5;
      for (auto& of_digit : made) {
        std::array<double, kBits> of_bit;  // the highest first
        for (double& factor : of_bit) factor = root = std::sqrt(root);
        for (size_t k = 0; k < of_digit.size(); ++k) {
          of_digit[k] = 1;
          for (size_t bit = 0; bit < of_bit.size(); ++bit) {
            if ((k >> (kBits - 1 - bit) & 1) != 0) of_digit[k] *= of_bit[bit];
          }
        }
      }
      return made;
    }();
    return all;
  }
};

}  // namespace rec_sdk
