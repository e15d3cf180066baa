// Computes at compile time how many planes of the pool a formula uses at once: the formula is evaluated with
// planes that only count, by the rules of planes.h.
#pragma once

#include "op_kernels/common/ascendc/memory.h"
#include "op_kernels/common/numbers.h"
#include "op_kernels/common/optimizers.h"

namespace rec_sdk {
namespace ascendc {

struct PlaneTally {
  int used = 0, most = 0;

  __aicore__ inline constexpr void take() {
    ++used;
    most = maximum(most, used);
  }
};

// A plane that only counts. `owned`: 1 if it has a plane of the pool, else 0. `need`: the maximum number of
// planes that its expression may have used. A C++17 constant expression has no destructors, so a named
// intermediate result counts until the end.
struct CountedPlane {
  PlaneTally* tally;
  int owned, need;

  __aicore__ inline constexpr CountedPlane() : CountedPlane(nullptr, 0, 0) {}
  __aicore__ inline constexpr CountedPlane(PlaneTally* tally, int owned, int need)
      : tally(tally), owned(owned), need(need) {}
  __aicore__ inline constexpr CountedPlane(const CountedPlane& other) : CountedPlane(other.tally, 1, 1) {
    tally->take();
  }
  __aicore__ inline constexpr CountedPlane(CountedPlane&& other)
      : CountedPlane(other.tally, other.owned, other.need) {
    other.owned = 0;
  }

  __aicore__ inline constexpr CountedPlane& operator=(const CountedPlane&) { return *this; }
  __aicore__ inline constexpr CountedPlane& operator=(CountedPlane&& other) { return use_up(&other); }
  __aicore__ inline constexpr CountedPlane& operator+=(const CountedPlane&) { return *this; }
  __aicore__ inline constexpr CountedPlane& operator+=(CountedPlane&& other) { return use_up(&other); }
  __aicore__ inline constexpr CountedPlane& operator-=(const CountedPlane&) { return *this; }
  __aicore__ inline constexpr CountedPlane& operator-=(CountedPlane&& other) { return use_up(&other); }
  __aicore__ inline constexpr CountedPlane& operator*=(const CountedPlane&) { return *this; }
  __aicore__ inline constexpr CountedPlane& operator*=(CountedPlane&& other) { return use_up(&other); }
  __aicore__ inline constexpr CountedPlane& operator*=(float) { return *this; }

 private:
  __aicore__ inline constexpr CountedPlane& use_up(CountedPlane* temporary) {
    tally->used -= temporary->owned;
    temporary->owned = 0;
    return *this;
  }
};

// An operand of an operator. Only a temporary releases its plane.
struct CountedOperand {
  PlaneTally* tally;
  int owned, need;

  __aicore__ inline constexpr CountedOperand(const CountedPlane& plane)
      : tally(plane.tally), owned(0), need(0) {}
  __aicore__ inline constexpr CountedOperand(CountedPlane&& plane)
      : tally(plane.tally), owned(plane.owned), need(plane.owned * plane.need) {
    plane.owned = 0;
  }
};

// Counts the result of an operator that used `need` planes, whose operands had `owned` planes.
__aicore__ inline constexpr CountedPlane counted(PlaneTally* tally, int owned, int need) {
  tally->used -= owned;
  tally->most = maximum(tally->most, tally->used + need);
  tally->take();
  return CountedPlane(tally, 1, need);
}
// A compiler may compute either operand first, and holds its result while it computes the other one.
__aicore__ inline constexpr CountedPlane counted(const CountedOperand& a, const CountedOperand& b) {
  const int operands = maximum(maximum(a.need, a.owned + b.need), maximum(b.need, b.owned + a.need));
  return counted(a.tally, a.owned + b.owned, maximum(1, operands));
}
__aicore__ inline constexpr CountedPlane counted(const CountedOperand& a) {
  return counted(a.tally, a.owned, maximum(1, a.need));
}
__aicore__ inline constexpr CountedPlane counted_beside(const CountedOperand& a) {
  return counted(a.tally, a.owned, maximum(a.owned + 1, a.need));
}

#define REC_SDK_COUNTED __aicore__ inline constexpr CountedPlane
REC_SDK_COUNTED operator+(CountedOperand a, CountedOperand b) { return counted(a, b); }
REC_SDK_COUNTED operator-(CountedOperand a, CountedOperand b) { return counted(a, b); }
REC_SDK_COUNTED operator*(CountedOperand a, CountedOperand b) { return counted(a, b); }
REC_SDK_COUNTED operator/(CountedOperand a, CountedOperand b) { return counted(a, b); }
REC_SDK_COUNTED operator+(CountedOperand a, float) { return counted(a); }
REC_SDK_COUNTED operator+(float, CountedOperand b) { return counted(b); }
REC_SDK_COUNTED operator-(CountedOperand a, float) { return counted(a); }
REC_SDK_COUNTED operator*(CountedOperand a, float) { return counted(a); }
REC_SDK_COUNTED operator*(float, CountedOperand b) { return counted(b); }
REC_SDK_COUNTED operator-(float, CountedOperand b) { return counted_beside(b); }
REC_SDK_COUNTED operator/(float, CountedOperand b) { return counted_beside(b); }
REC_SDK_COUNTED operator/(CountedOperand a, float) { return counted_beside(a); }
REC_SDK_COUNTED sqrtf(CountedOperand a) { return counted(a); }
REC_SDK_COUNTED at_most(CountedOperand a, float) { return counted(a); }
REC_SDK_COUNTED at_least(CountedOperand a, float) { return counted(a); }
#undef REC_SDK_COUNTED

// Returns counting planes for the values of a row. If owned > 0, each value takes a plane of the pool.
template <int kCount>
__aicore__ inline constexpr Numbers<CountedPlane, kCount> counted_values(
    PlaneTally* tally, int owned, const Numbers<CountedPlane, kCount>&) {
  Numbers<CountedPlane, kCount> values;
  for (CountedPlane& value : values.each) {
    value.tally = tally;
    if (owned > 0) tally->take();
  }
  return values;
}
__aicore__ inline constexpr REC_SDK_ISA::NoValues counted_values(PlaneTally*, int, REC_SDK_ISA::NoValues) {
  return {};
}

// Returns the maximum number of planes of the passes from kPass on and of the update. `before` has the type
// of the previous pass's values.
template <int kPass, class Optimizer, class Values>
__aicore__ inline constexpr int planes_from_pass(const Optimizer& optimizer, const Values& before) {
  PlaneTally elements;
  CountedPlane g(&elements, 0, 0), w(&elements, 0, 0);
  CountedPlane states[Optimizer::kElementStates + 1];
  for (CountedPlane& state : states) state.tally = &elements;
  const auto of_columns = counted_values(&elements, 1, before);
  if constexpr (kPass == Optimizer::kMeasures) {
    optimizer.element(w, states, g, of_columns);
    return elements.most;
  } else {
    constexpr REC_SDK_ISA::Pass<kPass> kThis{};
    const auto terms = optimizer.measure(kThis, w, states, g, of_columns);
    PlaneTally rows;
    CountedPlane row_states[Optimizer::kRowStates + 1];
    for (CountedPlane& state : row_states) state.tally = &rows;
    const auto values = optimizer.begin_row(kThis, row_states, counted_values(&rows, 0, terms), 5.0f,
                                            counted_values(&rows, 0, before));
    return maximum(maximum(elements.most, rows.most), planes_from_pass<kPass + 1>(optimizer, values));
  }
}

// Returns the maximum number of planes that the update of a tile uses at once, as UpdateTiles evaluates the
// formula.
template <class Optimizer>
__aicore__ inline constexpr int planes_of_formula() {
  constexpr float kAny[kCoefficients] = {2, 3, 5, 7, 11, 13, 17, 19, 23};
  const Optimizer optimizer(kAny);
  PlaneTally advance;
  CountedPlane g(&advance, 0, 0);
  CountedPlane states[Optimizer::kElementStates + 1];
  for (CountedPlane& state : states) state.tally = &advance;
  optimizer.advance(states, g);
  return maximum(advance.most, planes_from_pass<0>(optimizer, REC_SDK_ISA::NoValues{}));
}

}  // namespace ascendc
}  // namespace rec_sdk
