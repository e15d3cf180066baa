// Compares formulas on planes, which are vectors in UB, bit by bit with the same formulas on floats.
#include <cmath>

#include "op_kernels/common/ascendc/plane_count.h"
#include "op_kernels/common/ascendc/planes.h"
#include "op_kernels/common/ascendc/signal.h"
#include "tests/ascendc_kernels/support.h"

namespace {

using rec_sdk::ascendc::CountedPlane;
using rec_sdk::ascendc::Landing;
using rec_sdk::ascendc::Plane;
using rec_sdk::ascendc::PlanePool;
using rec_sdk::ascendc::PlaneTally;

constexpr int64_t kCount = 200;

// Formulas that update a from b.
struct Arithmetic {
  template <class T>
  constexpr void operator()(T& a, const T& b) const {
    a = (a + b) * (a - b) / (b * b + 2.0f);
  }
};
struct WithScalars {
  template <class T>
  constexpr void operator()(T& a, const T& b) const {
    a = 1.5f / (2.0f + a * a) - (b - 0.25f) / 3.0f;
    a += (1.0f - b) * 0.5f + 0.1f * a;
  }
};
struct InPlace {
  template <class T>
  constexpr void operator()(T& a, const T& b) const {
    const T old = a;
    a += b;
    a *= old;
    a -= sqrtf(old * old);
    a *= 0.75f;
  }
};
// A deeply nested expression.
struct Balanced {
  template <class T>
  constexpr void operator()(T& a, const T& b) const {
    a = ((a + b) * (a - b) - (a * b) * (b * b)) / ((a * a) * (b + a) + (a - b) * (a + 1.0f));
  }
};
// The number of named results in `Named`. All of them live until the end of the formula, so they need as many
// planes.
constexpr int kNamed = 9;
struct Named {
  template <class T>
  constexpr void operator()(T& a, const T& b) const {
    nest<kNamed>(a, b);
  }

 private:
  template <int kLeft, class T>
  constexpr void nest(T& a, const T& b) const {
    if constexpr (kLeft > 0) {
      const T result = b + 1.0f;
      nest<kLeft - 1>(a, result);
      a -= result;
    }
  }
};
struct Assigned {
  template <class T>
  constexpr void operator()(T& a, const T& b) const {
    a = b;
  }
};

template <class Formula>
constexpr int planes_of() {
  PlaneTally tally;
  CountedPlane a(&tally, 0, 0), b(&tally, 0, 0);
  Formula{}(a, b);
  return tally.most;
}

static_assert(planes_of<Named>() == kNamed);

template <class Formula>
void on_planes(const float* a, const float* b, float* out, int planes) {
  AscendC::TPipe pipe;
  Landing storage;
  PlanePool pool;
  pipe.InitBuffer(storage, 2 * kCount * 4);
  pool.init(&pipe, kCount, planes);
  const auto both = storage.Get<float>();
  rec_sdk::ascendc::load(both, a, kCount);
  rec_sdk::ascendc::load(both[kCount], b, kCount);
  rec_sdk::ascendc::Signal<AscendC::HardEvent::MTE2_V> loaded;
  rec_sdk::ascendc::Signal<AscendC::HardEvent::V_MTE3> computed;
  loaded.init(&pipe);
  computed.init(&pipe);
  loaded.order();
  {
    Plane left(&pool, both, kCount);
    const Plane right(&pool, both[kCount], kCount);
    Formula{}(left, right);
  }
  CHECK(pool.take() == 0);  // all planes were returned
  computed.order();
  rec_sdk::ascendc::store(out, both, kCount);
}

template <class Formula>
void check(const char* name) {
  kernel_tests::Random random(7);
  const std::vector<float> a = kernel_tests::random_floats(&random, kCount),
                           b = kernel_tests::random_floats(&random, kCount);
  std::vector<float> expected = a, found(kCount);
  for (int64_t i = 0; i < kCount; ++i) Formula{}(expected[i], b[i]);
  rec_sdk::emulator::Buffers buffers;
  buffers.read("a", a.data(), kCount).read("b", b.data(), kCount).write("out", found.data(), kCount);
  constexpr int kPlanes = planes_of<Formula>();
  const auto run = [&](int planes) { on_planes<Formula>(a.data(), b.data(), found.data(), planes); };
  ascendc_tests::run(name, 1, buffers, [&] { run(std::max(1, kPlanes)); });
  ascendc_tests::check_bits(name, 1, found, expected);
  if (kPlanes > 1) {  // with one plane less, the kernel writes past the end of the pool
    bool refused = false;
    try {
      rec_sdk::emulator::run_kernel(name, 1, buffers.list(), [&] { run(kPlanes - 1); });
    } catch (const rec_sdk::emulator::KernelError&) {
      refused = true;
    }
    CHECK(refused);
  }
}

}  // namespace

int main() {
  check<Arithmetic>("arithmetic");
  check<WithScalars>("with scalars");
  check<InPlace>("in place");
  check<Balanced>("balanced");
  check<Assigned>("assigned");
  check<Named>("named");
  return check_result();
}
