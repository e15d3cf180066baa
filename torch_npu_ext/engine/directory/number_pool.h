// Hands out the numbers 0, 1, 2, ..., of rows or of slots. Freed numbers go first, the latest of them
// first of all, so what a number is depends on the order of calls alone.
#pragma once

#include <cstdint>

#include "torch_npu_ext/engine/base/memory.h"

namespace rec_sdk {

class NumberPool {
 public:
  NumberPool() : free_(sizeof(uint32_t)) {}

  int64_t bound() const { return bound_; }           // one past the largest number ever handed out
  int64_t count() const { return bound_ - freed_; }  // numbers handed out and not freed

  // The number that the k-th call of take() from now on will give, from 0.
  uint32_t peek(int64_t k = 0) const {
    return k < freed_ ? *place(freed_ - 1 - k) : static_cast<uint32_t>(bound_ + k - freed_);
  }
  uint32_t take() {
    const uint32_t number = peek();
    freed_ > 0 ? --freed_ : ++bound_;
    return number;
  }
  // Undoes take(), the latest first; `bound_before` is the bound before the first of those to be undone. When
  // nothing else happened since, the pool is as before. Otherwise numbers may come in another order.
  void put_back(uint32_t number, int64_t bound_before) noexcept {
    if (number >= bound_before && number + 1 == bound_) {
      --bound_;
    } else {
      free(number);
    }
  }

  // Address space to free all numbers below `bound`: free() of them cannot fail. Throws std::bad_alloc
  void reserve(int64_t bound) {
    if (static_cast<size_t>(bound) > free_.size()) free_.extend(static_cast<size_t>(bound));
  }
  void free(uint32_t number) noexcept { *place(freed_++) = number; }

  template <class Visit>  // visit(number) of those that were handed out and freed
  void for_each_free(Visit visit) const {
    for (int64_t i = 0; i < freed_; ++i) visit(*place(i));
  }

  void clear() {
    free_.clear();
    freed_ = bound_ = 0;
  }

 private:
  uint32_t* place(int64_t i) const { return static_cast<uint32_t*>(free_.at(static_cast<size_t>(i))); }

  ChunkedMemory free_;  // [freed_] a stack
  int64_t freed_ = 0;
  int64_t bound_ = 0;
};

}  // namespace rec_sdk
