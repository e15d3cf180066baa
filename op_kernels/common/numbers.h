// A fixed-size array of numbers: the sums over a row, or the values that an optimizer computes from them.
#pragma once

namespace rec_sdk {

template <class T, int N>
struct Numbers {
  static constexpr int kCount = N;
  T each[N];
};

}  // namespace rec_sdk
