// Windows in UB of int32 arrays in GM that the scalar unit reads together, nearly in order. The next window
// is fetched in advance. A reader may go back by half a window without a second fetch. It may also jump
// ahead; a window is then fetched only from that element on.
#pragma once

#include "op_kernels/common/ascendc/signal.h"

namespace rec_sdk {
namespace ascendc {

// kWindow: number of elements, a power of two.
template <int kArrays, int64_t kWindow>
class IndexWindows {
 public:
  static constexpr int64_t kBytesOfArray = 2 * kWindow * 4;

  __aicore__ inline void init(TPipe* pipe) {
    for (int h = 0; h < 2; ++h) {
      arrived_[h].init(pipe);
      released_[h].init(pipe);
      window_[h] = -1;
      pending_[h] = false;
    }
    low_ = span_ = 0;
    for (int a = 0; a < kArrays; ++a) data_[a] = nullptr;
  }

  // Adds array a, which is read up to `end`, and takes kBytesOfArray of UB. Null means no array.
  __aicore__ inline void add(TPipe* pipe, int a, const int32_t* data, int64_t end) {
    data_[a] = data;
    end_[a] = end;
    if (data == nullptr) return;
    pipe->InitBuffer(buffer_[a], kBytesOfArray);
    windows_[a] = buffer_[a].template Get<int32_t>();
  }

  // Fetches element i of all arrays into UB.
  __aicore__ inline void reach(int64_t i) {
    if (static_cast<uint64_t>(i - low_) >= span_) find(i);
  }

  // Fetches elements [first, last] of all arrays into UB. They must span at most half a window, or fit() must
  // return true for them.
  __aicore__ inline void reach(int64_t first, int64_t last) {
    reach(first);
    const int64_t window_of_last = align_down(last, kWindow);
    if (first < window_of_last) reach(window_of_last);
    reach(last);
  }

  // Returns whether all of [first, last] are in UB at once: they are in the window of the first and the first
  // half of the next window.
  __aicore__ inline static bool fit(int64_t first, int64_t last) {
    return last < align_down(first, kWindow) + kWindow + kWindow / 2;
  }

  // Returns an element that reach() fetched, at most half a window before the latest one fetched.
  __aicore__ inline int32_t at(int a, int64_t i) const { return windows_[a].GetValue(place(i)); }
  // Returns an element of an array of floats; otherwise the same as at().
  __aicore__ inline float float_at(int a, int64_t i) const {
    return windows_[a].template ReinterpretCast<float>().GetValue(place(i));
  }
  __aicore__ inline int32_t get(int a, int64_t i) {
    reach(i);
    return at(a, i);
  }

  // Calls reach(i), and returns the end of the elements in UB that follow element i.
  __aicore__ inline int64_t reached(int64_t i) {
    reach(i);
    return low_ + static_cast<int64_t>(span_);
  }

  // Consecutive elements in UB from i on, at most `most`, for which at() may be called.
  struct Run {
    LocalTensor<int32_t> values;
    int64_t count;
  };
  __aicore__ inline Run run(int a, int64_t i, int64_t most) const {
    return {windows_[a][place(i)], minimum(most, static_cast<int64_t>(2 * kWindow - place(i)))};
  }

  // Calls reach(i), and then returns run(a, i, most) of the fetched elements.
  __aicore__ inline Run reached_run(int a, int64_t i, int64_t most) {
    return run(a, i, minimum(most, reached(i) - i));
  }

  // Waits for fetches that were not used.
  __aicore__ inline void finish() {
    for (int h = 0; h < 2; ++h) settle(h);
  }

 private:
  __aicore__ inline static uint32_t place(int64_t i) { return static_cast<uint32_t>(i) % (2 * kWindow); }

  // Implements reach(), and computes the range of elements for which reach() needs to do nothing.
  __aicore__ inline void find(int64_t i) {
    const int64_t window = i / kWindow;
    const int half = static_cast<int>(window % 2);
    if (window_[half] != window || i < from_[half]) fetch(window, align_down(i, kUbBlock / 4));
    settle(half);
    const int64_t end = (window + 1) * kWindow, ahead = from_[half] + kWindow / 2;
    if (i >= ahead && window_[1 - half] != window + 1) fetch(window + 1, end);
    low_ = from_[half];
    span_ = static_cast<uint64_t>((window_[1 - half] == window + 1 ? end : minimum(end, ahead)) - low_);
  }

  __aicore__ inline void settle(int half) {
    if (pending_[half]) arrived_[half].wait();
    pending_[half] = false;
  }

  // Fetches elements [from, end of the window). Each half has its own signal: the former fetch into this half
  // has completed, so its signal was consumed, but the other half's fetch may not have started.
  __aicore__ inline void fetch(int64_t window, int64_t from) {
    const int half = static_cast<int>(window % 2);
    settle(half);
    released_[half].order();
    for (int a = 0; a < kArrays; ++a) {
      const int64_t last = minimum((window + 1) * kWindow, end_[a]);
      if (data_[a] == nullptr || from >= last) continue;
      load(windows_[a][place(from)], data_[a] + from, last - from);
    }
    arrived_[half].set();
    window_[half] = window;
    from_[half] = from;
    pending_[half] = true;
  }

  Landing buffer_[kArrays];
  LocalTensor<int32_t> windows_[kArrays];
  const int32_t* data_[kArrays];
  int64_t end_[kArrays];
  int64_t window_[2], from_[2];
  int64_t low_;  // each of the elements [low_, low_ + span_) is in UB, and the next window is being fetched
                 // in time
  uint64_t span_;
  bool pending_[2];
  Signal<HardEvent::MTE2_S> arrived_[2];
  Signal<HardEvent::S_MTE2> released_[2];
};

}  // namespace ascendc
}  // namespace rec_sdk
