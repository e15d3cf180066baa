// A few numbers of one kind: sums over a row, and what an optimizer makes of them.
#pragma once

namespace rec_sdk {

template <class T, int N>
struct Numbers {
  static constexpr int kCount = N;
  T each[N];
};

}  // namespace rec_sdk
