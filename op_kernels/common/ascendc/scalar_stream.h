// Scalars of an array in GM, read in order (slots, offsets, sample weights). Chunks are copied to UB by DMA;
// the next chunk is copied while the present one is read. If the scalar unit read GM directly, it would stall
// at every cache line.
#pragma once

#include "op_kernels/common/ascendc/signal.h"

namespace rec_sdk {
namespace ascendc {

// kChunk: number of elements, a power of two. Uses 2 * kChunk * sizeof(T) bytes of UB.
template <class T, int64_t kChunk>
class ScalarStream {
 public:
  static constexpr uint32_t kBytes = 2 * kChunk * sizeof(T);

  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(buffer_, kBytes);
    halves_ = buffer_.template Get<T>();
    arrived_.init(pipe);
    released_.init(pipe);
  }

  // Called after the last at().
  __aicore__ inline void release(TPipe* pipe) const {
    arrived_.release(pipe);
    released_.release(pipe);
  }

  // Starts reading elements [begin, end) of the array; at() must then reach the last element. start() may be
  // called again after that.
  __aicore__ inline void start(const T* array, int64_t begin, int64_t end) {
    from_ = array + begin;
    begin_ = begin;
    count_ = end - begin;
    chunk_ = -1;
    if (count_ > 0) fetch(0);
  }

  // Returns element i of the array; i must not be in an earlier chunk, counted from `begin`, than the
  // previous one.
  __aicore__ inline T at(int64_t i) {
    const auto index = static_cast<uint64_t>(i - begin_);
    while (chunk_ < static_cast<int64_t>(index / kChunk)) advance();
    return halves_.GetValue(static_cast<uint32_t>(index % (2 * kChunk)));
  }

  // Consecutive elements in UB.
  struct Run {
    LocalTensor<T> values;
    int64_t count;
  };
  // Returns a run of elements from i on, at least one and at most `most`, for loops that read nothing else.
  // It advances like at() of its last element.
  __aicore__ inline Run run(int64_t i, int64_t most) {
    const auto index = static_cast<uint64_t>(i - begin_);
    while (chunk_ < static_cast<int64_t>(index / kChunk)) advance();
    return {halves_[static_cast<uint32_t>(index % (2 * kChunk))],
            minimum(most, static_cast<int64_t>(kChunk - index % kChunk))};
  }

 private:
  __aicore__ inline void advance() {
    ++chunk_;
    arrived_.wait();
    if ((chunk_ + 1) * kChunk < count_) fetch(chunk_ + 1);
  }

  __aicore__ inline void fetch(int64_t chunk) {
    released_.order();
    const int64_t first = chunk * kChunk;
    load(halves_[static_cast<uint32_t>(first % (2 * kChunk))], from_ + first,
         minimum(kChunk, count_ - first));
    arrived_.set();
  }

  Landing buffer_;
  LocalTensor<T> halves_;
  const T* from_ = nullptr;
  int64_t begin_ = 0, count_ = 0, chunk_ = -1;
  Signal<HardEvent::MTE2_S> arrived_;
  Signal<HardEvent::S_MTE2> released_;
};

}  // namespace ascendc
}  // namespace rec_sdk
