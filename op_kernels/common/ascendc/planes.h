// Arithmetic on planes of floats in UB, so that a formula written for floats (optimizers.h) also runs on a
// tile of rows: each operator is one vector instruction, which rounds once, as the operator of floats does.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

// Storage of the temporaries of an expression. Operators reuse their operands' storage, so that even long
// formulas need few: Adam one, a division of or by a number one more than other operators.
class PlanePool {
 public:
  // planes: as many as planes_of_formula() counts.
  __aicore__ inline void init(TPipe* pipe, int64_t elements, int planes) {
    elements_ = static_cast<uint32_t>(elements);
    pipe->InitBuffer(buffer_, static_cast<uint32_t>(planes) * elements_ * 4);
    used_ = 0;
  }
  // There is one.
  __aicore__ inline int take() {
    int index = 0;
    while ((used_ >> index) & 1) ++index;
    used_ |= 1u << index;
    return index;
  }
  __aicore__ inline void give_back(int index) { used_ &= ~(1u << index); }
  __aicore__ inline LocalTensor<float> plane(int index) {
    return buffer_.Get<float>()[static_cast<uint32_t>(index) * elements_];
  }

 private:
  Scratch buffer_;
  uint32_t elements_;
  uint32_t used_;
};

// Where a plane lies. `owned`: its index in the pool if it is to be given back, else -1.
struct PlaneStorage {
  PlanePool* pool;
  LocalTensor<float> data;
  int32_t count;
  int owned;

  __aicore__ inline void release() {
    if (owned >= 0) pool->give_back(owned);
    owned = -1;
  }
  // A new plane of the same size.
  __aicore__ inline PlaneStorage another() const {
    const int index = pool->take();
    return {pool, pool->plane(index), count, index};
  }
};

class Plane {
 public:
  __aicore__ inline Plane() : at_{nullptr, {}, 0, -1} {}
  // The first `count` floats of `data`, whose owner is elsewhere.
  __aicore__ inline Plane(PlanePool* pool, const LocalTensor<float>& data, int32_t count)
      : at_{pool, data, count, -1} {}
  __aicore__ inline void view(PlanePool* pool, const LocalTensor<float>& data, int32_t count) {
    at_ = {pool, data, count, -1};
  }
  // Takes over storage of the pool.
  __aicore__ inline explicit Plane(const PlaneStorage& storage) : at_(storage) {}
  __aicore__ inline Plane(const Plane& other) : at_(other.at_.another()) { copy(other); }
  __aicore__ inline Plane(Plane&& other) : at_(other.at_) { other.at_.owned = -1; }
  __aicore__ inline ~Plane() { at_.release(); }

  // Assignment copies values, as that of floats does.
  __aicore__ inline Plane& operator=(const Plane& other) {
    copy(other);
    return *this;
  }
  __aicore__ inline Plane& operator+=(const Plane& other) {
    AscendC::Add(at_.data, at_.data, other.at_.data, at_.count);
    vector_barrier();
    return *this;
  }
  __aicore__ inline Plane& operator-=(const Plane& other) {
    AscendC::Sub(at_.data, at_.data, other.at_.data, at_.count);
    vector_barrier();
    return *this;
  }
  __aicore__ inline Plane& operator*=(const Plane& other) {
    AscendC::Mul(at_.data, at_.data, other.at_.data, at_.count);
    vector_barrier();
    return *this;
  }
  __aicore__ inline Plane& operator*=(float factor) {
    AscendC::Muls(at_.data, at_.data, factor, at_.count);
    vector_barrier();
    return *this;
  }

  __aicore__ inline PlaneStorage& storage() { return at_; }
  __aicore__ inline const PlaneStorage& storage() const { return at_; }

 private:
  __aicore__ inline void copy(const Plane& other) {
    copy_values(at_.data, other.at_.data, at_.count);
    vector_barrier();
  }

  PlaneStorage at_;
};

// A plane to read; from a temporary, which nothing else reads, also one to write the result to.
class Operand {
 public:
  __aicore__ inline Operand(const Plane& plane) : at_(plane.storage()) { at_.owned = -1; }
  __aicore__ inline Operand(Plane&& plane) : at_(plane.storage()) { plane.storage().owned = -1; }
  __aicore__ inline Operand(const Operand&) = delete;
  __aicore__ inline ~Operand() { release(); }
  __aicore__ inline void release() { at_.release(); }

  __aicore__ inline const LocalTensor<float>& data() const { return at_.data; }
  __aicore__ inline bool temporary() const { return at_.owned >= 0; }
  __aicore__ inline PlaneStorage another() const { return at_.another(); }
  __aicore__ inline PlaneStorage give() {
    const PlaneStorage given = at_;
    at_.owned = -1;
    return given;
  }

 private:
  PlaneStorage at_;
};

__aicore__ inline PlaneStorage result_of(Operand& a) { return a.temporary() ? a.give() : a.another(); }
__aicore__ inline PlaneStorage result_of(Operand& a, Operand& b) {
  return a.temporary() ? a.give() : result_of(b);
}

// The result of the instruction just issued. Operands that are temporaries end here and not where C++ ends
// them, with the whole expression: else it would need a plane for each of its operators.
__aicore__ inline Plane finished(const PlaneStorage& result, Operand& a) {
  vector_barrier();
  a.release();
  return Plane(result);
}
__aicore__ inline Plane finished(const PlaneStorage& result, Operand& a, Operand& b) {
  b.release();
  return finished(result, a);
}

__aicore__ inline Plane operator+(Operand a, Operand b) {
  const PlaneStorage result = result_of(a, b);
  AscendC::Add(result.data, a.data(), b.data(), result.count);
  return finished(result, a, b);
}
__aicore__ inline Plane operator-(Operand a, Operand b) {
  const PlaneStorage result = result_of(a, b);
  AscendC::Sub(result.data, a.data(), b.data(), result.count);
  return finished(result, a, b);
}
__aicore__ inline Plane operator*(Operand a, Operand b) {
  const PlaneStorage result = result_of(a, b);
  AscendC::Mul(result.data, a.data(), b.data(), result.count);
  return finished(result, a, b);
}
__aicore__ inline Plane operator/(Operand a, Operand b) {
  const PlaneStorage result = result_of(a, b);
  AscendC::Div(result.data, a.data(), b.data(), result.count);
  return finished(result, a, b);
}

__aicore__ inline Plane operator+(Operand a, float b) {
  const PlaneStorage result = result_of(a);
  AscendC::Adds(result.data, a.data(), b, result.count);
  return finished(result, a);
}
__aicore__ inline Plane operator+(float a, Operand b) {
  const PlaneStorage result = result_of(b);
  AscendC::Adds(result.data, b.data(), a, result.count);
  return finished(result, b);
}
__aicore__ inline Plane operator-(Operand a, float b) {
  const PlaneStorage result = result_of(a);
  AscendC::Adds(result.data, a.data(), -b, result.count);
  return finished(result, a);
}
__aicore__ inline Plane operator*(Operand a, float b) {
  const PlaneStorage result = result_of(a);
  AscendC::Muls(result.data, a.data(), b, result.count);
  return finished(result, a);
}
__aicore__ inline Plane operator*(float a, Operand b) {
  const PlaneStorage result = result_of(b);
  AscendC::Muls(result.data, b.data(), a, result.count);
  return finished(result, b);
}

// A plane full of one number: division has no form with a scalar, and a reciprocal would round twice.
__aicore__ inline PlaneStorage filled(const PlaneStorage& plane, float value) {
  AscendC::Duplicate(plane.data, value, plane.count);
  vector_barrier();
  return plane;
}
__aicore__ inline Plane operator-(float a, Operand b) {
  const PlaneStorage result = filled(b.another(), a);
  AscendC::Sub(result.data, result.data, b.data(), result.count);
  return finished(result, b);
}
__aicore__ inline Plane operator/(float a, Operand b) {
  const PlaneStorage result = filled(b.another(), a);
  AscendC::Div(result.data, result.data, b.data(), result.count);
  return finished(result, b);
}
__aicore__ inline Plane operator/(Operand a, float b) {
  const PlaneStorage result = filled(a.another(), b);
  AscendC::Div(result.data, a.data(), result.data, result.count);
  return finished(result, a);
}

__aicore__ inline Plane sqrtf(Operand a) {
  const PlaneStorage result = result_of(a);
  AscendC::Sqrt(result.data, a.data(), result.count);
  return finished(result, a);
}

// As those of optimizers.h.
__aicore__ inline Plane at_most(Operand a, float bound) {
  const PlaneStorage result = result_of(a);
  AscendC::Mins(result.data, a.data(), bound, result.count);
  return finished(result, a);
}
__aicore__ inline Plane at_least(Operand a, float bound) {
  const PlaneStorage result = result_of(a);
  AscendC::Maxs(result.data, a.data(), bound, result.count);
  return finished(result, a);
}

}  // namespace ascendc
}  // namespace rec_sdk
