// A double with the arithmetic operators that formulas use (op_kernels/common/optimizer_base.h); the other
// operand may be a float.
#pragma once

#include <cmath>

namespace kernel_tests {

struct Real {
  double value;

  Real& operator+=(Real b) { return *this = {value + b.value}; }
  Real& operator-=(Real b) { return *this = {value - b.value}; }
  Real& operator*=(Real b) { return *this = {value * b.value}; }
  Real& operator*=(float b) { return *this = {value * b}; }
};

inline Real operator+(Real a, Real b) { return {a.value + b.value}; }
inline Real operator+(Real a, float b) { return {a.value + b}; }
inline Real operator+(float a, Real b) { return {a + b.value}; }
inline Real operator-(Real a, Real b) { return {a.value - b.value}; }
inline Real operator-(Real a, float b) { return {a.value - b}; }
inline Real operator-(float a, Real b) { return {a - b.value}; }
inline Real operator*(Real a, Real b) { return {a.value * b.value}; }
inline Real operator*(Real a, float b) { return {a.value * b}; }
inline Real operator*(float a, Real b) { return {a * b.value}; }
inline Real operator/(Real a, Real b) { return {a.value / b.value}; }
inline Real operator/(Real a, float b) { return {a.value / b}; }
inline Real operator/(float a, Real b) { return {a / b.value}; }
inline Real sqrtf(Real a) { return {std::sqrt(a.value)}; }
inline Real at_most(Real a, float bound) { return {bound < a.value ? bound : a.value}; }
inline Real at_least(Real a, float bound) { return {a.value < bound ? bound : a.value}; }

}  // namespace kernel_tests
