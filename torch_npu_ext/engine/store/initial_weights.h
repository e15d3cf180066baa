// Generation of the initial weights of a row: random numbers, and their conversion to a distribution. Results
// are bit-identical on all processors.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace rec_sdk {

// Returns the standard normal quantile of p in [0.02275, 0.97725], with an absolute error below 1e-8. It does
// not use libm.
double central_normal_quantile(double p);

// Returns the standard normal quantile of p in (0, 1), with an absolute error below 1e-8. The only function
// of libm that it uses is sqrt, which is correctly rounded.
double normal_quantile(double p);

// Returns the probability of the standard normal distribution below z, for z in [-37, 0]. It is the inverse
// of normal_quantile().
double lower_normal_tail(double z);

// Maps a uniformly distributed number to a standard normally distributed number between two bounds. If most
// of the interval is positive it is mirrored, because floating-point numbers near 0 are more precise than
// near 1.
class BoundedNormal {
 public:
  BoundedNormal() = default;
  BoundedNormal(
      double lowest,
      double highest);  // throws std::invalid_argument for an interval whose probability is almost 0

  double operator()(double uniform) const;  // `uniform` is in [0, 1)

 private:
  double lowest_ = 0, highest_ = 0, from_ = 0.5, to_ = 0.5;
  bool mirrored_ = false;
};

// A distribution of weights: offset + scale * x, where x is a random number that depends on the kind.
struct WeightDistribution {
  enum class Kind {
    kUniform,  // x is uniformly distributed in [0, 1); a weight that rounds to `limit` becomes `below`
    kTruncatedNormal,  // x is standard normally distributed, cut off at two sigma
    kBoundedNormal,    // x is distributed like `normal`; weights are clamped to [below, limit]
  };
  Kind kind = Kind::kUniform;
  double offset = 0, scale = 0;
  float limit = HUGE_VALF, below = -HUGE_VALF;
  BoundedNormal normal = {};
};

constexpr int64_t kDrawnColumns = 64;  // the maximum of `count` in a call of DrawWeights

// A function that writes the weights of columns [begin, begin + count) of the row of an id. `begin` must be a
// multiple of 4.
using DrawWeights = void (*)(const WeightDistribution& distribution, std::array<uint32_t, 2> key, int64_t id,
                             int64_t begin, int64_t count, float* weights);

// Returns the variants of this function that the processor can run: compiled for the baseline instruction
// set, then for larger ones.
std::vector<DrawWeights> weight_drawers();

}  // namespace rec_sdk
