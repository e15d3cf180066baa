// A pool of the numbers 0, 1, 2, ..., for rows or slots. Freed numbers are reused before new ones, and the
// number that was freed last is reused first. The numbers thus depend only on the order of calls.
#pragma once

#include <cstdint>

#include "torch_npu_ext/engine/base/memory.h"

namespace rec_sdk {

class NumberPool {
 public:
  NumberPool() : free_(sizeof(uint32_t)) {}

  int64_t bound() const { return bound_; }           // one past the largest number taken so far
  int64_t count() const { return bound_ - freed_; }  // numbers taken and not freed

  // Returns the number that the k-th next call of take() will return; k = 0 means the next call.
  uint32_t peek(int64_t k = 0) const {
    return k < freed_ ? *place(freed_ - 1 - k) : static_cast<uint32_t>(bound_ + k - freed_);
  }
  uint32_t take() {
    const uint32_t number = peek();
    freed_ > 0 ? --freed_ : ++bound_;
    return number;
  }
  // Undoes a call of take(). Several calls are undone in reverse order; `bound_before` is the bound before
  // the first of them. If nothing else happened in between, the pool is exactly as before; otherwise numbers
  // may be reused in another order.
  void put_back(uint32_t number, int64_t bound_before) noexcept {
    if (number >= bound_before && number + 1 == bound_) {
      --bound_;
    } else {
      free(number);
    }
  }

  // Reserves space for freeing all numbers below `bound`, so that free() cannot fail. Throws std::bad_alloc.
  void reserve(int64_t bound) {
    if (static_cast<size_t>(bound) > free_.size()) free_.extend(static_cast<size_t>(bound));
  }
  void free(uint32_t number) noexcept { *place(freed_++) = number; }

  template <class Visit>  // calls visit(number) for every freed number
  void for_each_free(Visit visit) const {
    for (int64_t i = 0; i < freed_; ++i) visit(*place(i));
  }

  void clear() {
    free_.clear();
    freed_ = bound_ = 0;
  }

 private:
  uint32_t* place(int64_t i) const { return static_cast<uint32_t*>(free_.at(static_cast<size_t>(i))); }

  ChunkedMemory free_;  // [freed_] used as a stack
  int64_t freed_ = 0;
  int64_t bound_ = 0;
};

}  // namespace rec_sdk
