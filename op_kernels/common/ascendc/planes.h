// Arithmetic on planes of floats in UB, so that a formula written for floats (optimizers.h) also runs on a
// tile of rows: each operator is one vector instruction, which rounds once, like the operator on floats.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

// The storage of the temporaries of an expression. Operators reuse the storage of their operands, so even
// long formulas need few planes. Adam needs one. A division with a scalar operand needs one more than other
// operators.
class PlanePool {
 public:
  // planes: the result of planes_of_formula().
  __aicore__ inline void init(TPipe* pipe, int64_t elements, int planes) {
    elements_ = static_cast<uint32_t>(elements);
    pipe->InitBuffer(buffer_, static_cast<uint32_t>(planes) * elements_ * 4);
    used_ = 0;
  }
  // Returns a free plane. One is always free, because planes_of_formula() counts the planes needed.
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

// The storage of a plane. `owned`: its index in the pool if it must be released, else -1.
struct PlaneStorage {
  PlanePool* pool;
  LocalTensor<float> data;
  int32_t count;
  int owned;

  __aicore__ inline void release() {
    if (owned >= 0) pool->give_back(owned);
    owned = -1;
  }
  // Returns the storage of a new plane of the same size from the pool.
  __aicore__ inline PlaneStorage another() const {
    const int index = pool->take();
    return {pool, pool->plane(index), count, index};
  }
};

class Plane {
 public:
  __aicore__ inline Plane() : at_{nullptr, {}, 0, -1} {}
  // A view of the first `count` floats of `data`, which another object owns.
  __aicore__ inline Plane(PlanePool* pool, const LocalTensor<float>& data, int32_t count)
      : at_{pool, data, count, -1} {}
  __aicore__ inline void view(PlanePool* pool, const LocalTensor<float>& data, int32_t count) {
    at_ = {pool, data, count, -1};
  }
  // Takes ownership of storage of the pool.
  __aicore__ inline explicit Plane(const PlaneStorage& storage) : at_(storage) {}
  __aicore__ inline Plane(const Plane& other) : at_(other.at_.another()) { copy(other); }
  __aicore__ inline Plane(Plane&& other) : at_(other.at_) { other.at_.owned = -1; }
  __aicore__ inline ~Plane() { at_.release(); }

  // Copies the values, like an assignment of floats.
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

// An operand of an operator. If the plane is a temporary, nothing else reads it, and the operator may write
// its result there.
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

// Returns the result of the instruction just issued. Temporaries among the operands are released here instead
// of at the end of the whole C++ expression, where every operator would need its own plane.
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

// Fills a plane with one number. Division needs it, because it has no scalar form, and multiplication by a
// reciprocal would round twice.
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

// Implements the functions of row_steps.h for planes.
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
