// The initial weights of a row: random numbers, and their conversion to a distribution. Every processor gets
// the same bits.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace rec_sdk {

// Returns the standard normal quantile for p in [0.02275, 0.97725], with an absolute error below 1e-8,
// without libm.
double central_normal_quantile(double p);

// Returns the standard normal quantile for p in (0, 1), with an absolute error below 1e-8. Of libm it uses
// only sqrt, which is exactly rounded.
double normal_quantile(double p);

// Returns the p whose normal_quantile() is z, for z in [-37, 0].
double lower_normal_tail(double z);

// Maps a uniform number to a standard normal between two bounds. If most of the interval is positive it is
// mirrored, because probabilities of the lower half keep all their digits.
class BoundedNormal {
 public:
  BoundedNormal() = default;
  BoundedNormal(double lowest,
                double highest);  // throws std::invalid_argument if the interval has almost no probability

  double operator()(double uniform) const;  // uniform in [0, 1)

 private:
  double lowest_ = 0, highest_ = 0, from_ = 0.5, to_ = 0.5;
  bool mirrored_ = false;
};

// A distribution of weights: offset + scale * x, where x depends on the kind.
struct WeightDistribution {
  enum class Kind {
    kUniform,          // x is uniform in [0, 1); weights that round to `limit` or more become `below`
    kTruncatedNormal,  // x is a standard normal, cut off at two sigma
    kBoundedNormal,    // x is `normal`; weights are clamped to [below, limit]
  };
  Kind kind = Kind::kUniform;
  double offset = 0, scale = 0;
  float limit = HUGE_VALF, below = -HUGE_VALF;
  BoundedNormal normal = {};
};

// Writes the weights of columns [begin, begin + count) of a row. `begin` is a multiple of 4.
using DrawWeights = void (*)(const WeightDistribution& distribution, std::array<uint32_t, 2> key, int64_t id,
                             int64_t begin, int64_t count, float* weights);

// Returns the variants that this processor runs: compiled for the baseline and larger instruction sets.
std::vector<DrawWeights> weight_drawers();

}  // namespace rec_sdk
