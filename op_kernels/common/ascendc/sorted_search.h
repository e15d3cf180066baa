// Searches in sorted arrays in GM. Each round copies kSamples elements, spread over the remaining range, to
// UB with one DMA, or a short range as a whole. A binary search by the scalar unit would wait for memory
// log2(count) times; this search waits two or three times.
#pragma once

#include "op_kernels/common/ascendc/signal.h"

namespace rec_sdk {
namespace ascendc {

// An array of `size` elements in which a position in [low, high] is searched: the first element that is not
// below a target, or `high` if there is none. low <= high <= size.
template <class T>
struct SearchedArray {
  const T* data;
  int64_t size, low, high;
};

// The result of a search. `here` is the element at the position and `before` the element before it; each is 0
// if there is no such element. kFields: values per element.
template <class T, int64_t kFields>
struct FoundPlace {
  int64_t place;
  T here[kFields], before[kFields];
};

template <int64_t kSamples>
class SortedSearch {
 public:
  static constexpr int64_t kTargets = 2;
  static constexpr uint32_t kBytes = kTargets * kSamples * kUbBlock;

  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(buffer_, kBytes);
    arrived_.init(pipe);
    released_.init(pipe);
  }

  // below(t, i, values): returns whether element i of array t is below target t; its fields are
  // values.get(0), ... Two positions are searched at the same time, because a search mostly waits for memory.
  template <class T, int64_t kFields, class Below>
  __aicore__ inline void find(const SearchedArray<T> (&arrays)[kTargets], const Below& below,
                              FoundPlace<T, kFields> (&found)[kTargets]) {
    Range ranges[kTargets];
    for (int64_t t = 0; t < kTargets; ++t) {
      ranges[t] = {arrays[t].low, arrays[t].high, arrays[t].size == 0, 0, 1, 0};
      found[t] = {};
    }
    while (!ranges[0].found || !ranges[1].found) {
      released_.order();
      for (int64_t t = 0; t < kTargets; ++t) copy<T, kFields>(arrays[t], &ranges[t], t);
      arrived_.order();
      for (int64_t t = 0; t < kTargets; ++t) narrow(below, t, &ranges[t], &found[t]);
    }
  }

 private:
  // The remaining range of a search. `taken` elements are in UB: start, start + step, ...
  struct Range {
    int64_t low, high;
    bool found;
    int64_t start, step, taken;
  };

  // Access to the elements in UB. A sample has its own UB block; elements of a short range are contiguous.
  template <class T, int64_t kFields>
  struct Values {
    static constexpr int64_t kOfBlock = kUbBlock / sizeof(T);
    static constexpr int64_t kWindow = kSamples * kOfBlock / kFields;  // in elements
    static_assert(kFields <= kOfBlock, "an element fits into a block");

    LocalTensor<T> all;
    int64_t at;
    __aicore__ inline T get(int64_t field) const { return all.GetValue(static_cast<uint32_t>(at + field)); }
  };

  template <class T, int64_t kFields>
  __aicore__ inline void copy(const SearchedArray<T>& array, Range* range, int64_t target) {
    if (range->found) return;
    using Element = Values<T, kFields>;
    const LocalTensor<T> to = window<T>(target);
    if (range->high - range->low + 2 <= Element::kWindow) {  // including the element before
      range->start = maximum<int64_t>(0, range->low - 1);
      range->step = 1;
      range->taken = minimum(range->high + 1, array.size) - range->start;
      load(to, array.data + range->start * kFields, range->taken * kFields);
    } else {
      range->start = range->low;
      range->step = ceil_div(range->high - range->low, kSamples);
      range->taken = ceil_div(range->high - range->low, range->step);
      load_rows(to, array.data + range->start * kFields, range->taken, kFields, range->step * kFields,
                Element::kOfBlock);
    }
  }

  template <class T, int64_t kFields, class Below>
  __aicore__ inline void narrow(const Below& below, int64_t target, Range* range,
                                FoundPlace<T, kFields>* found) {
    if (range->found) return;
    using Element = Values<T, kFields>;
    const LocalTensor<T> all = window<T>(target);
    const int64_t pitch = range->step == 1 ? kFields : Element::kOfBlock;
    int64_t low = 0, high = range->taken;  // bounds of the number of elements below the target
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (below(target, range->start + middle * range->step, Element{all, middle * pitch})) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (range->step == 1) {
      range->found = true;
      found->place = range->start + low;
      for (int64_t f = 0; f < kFields; ++f) {
        if (low < range->taken) found->here[f] = Element{all, low * pitch}.get(f);
        if (low > 0) found->before[f] = Element{all, (low - 1) * pitch}.get(f);
      }
      return;
    }
    if (low < range->taken) range->high = range->start + low * range->step;
    if (low > 0) range->low = range->start + (low - 1) * range->step + 1;
  }

  template <class T>
  __aicore__ inline LocalTensor<T> window(int64_t target) {
    constexpr int64_t kValues = kSamples * kUbBlock / sizeof(T);
    return buffer_.template Get<T>()[static_cast<uint32_t>(target * kValues)];
  }

  Landing buffer_;
  Signal<HardEvent::MTE2_S> arrived_;
  Signal<HardEvent::S_MTE2> released_;
};

}  // namespace ascendc
}  // namespace rec_sdk
