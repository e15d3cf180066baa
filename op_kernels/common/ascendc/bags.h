// Device side: how the cores divide the bags of a pooled lookup, and where each bag lies in the output.
#pragma once

#include "op_kernels/common/ascendc/scalar_stream.h"

namespace rec_sdk {
namespace ascendc {

// Bytes moved for a lookup and for a bag; bags [0, k) cost offsets[k] * lookup + k * bag.
struct BagCosts {
  int64_t lookup, bag;

  __aicore__ inline int64_t before(int64_t bags, int64_t offset) const {
    return offset * lookup + bags * bag;
  }
};

// Finds the two ends of a core's share in `offsets` [count + 1]. A round copies kSamples offsets, spread over
// the range left, into UB with one DMA, and a short range as a whole: a binary search in GM would wait for
// memory log2(count) times, this one two or three times.
class BagSearch {
 public:
  static constexpr int64_t kWindow = 512, kSamples = 128, kTargets = 2;
  static constexpr uint32_t kBytes = kTargets * kWindow * sizeof(int64_t);

  // The first bag before which the bags cost at least the target (bags.count is the end of the last one),
  // where its lookups start, and where those of the bag before it do (0 for bag 0).
  struct Found {
    int64_t bag, first, first_of_previous;
  };

  __aicore__ inline void init(TPipe* pipe) {
    pipe->InitBuffer(buffer_, kBytes);
    arrived_.init(pipe);
    released_.init(pipe);
  }

  // 0 <= targets <= the cost of all bags. At the same time, since most of it is waiting.
  __aicore__ inline void find(const Bags& bags, const BagCosts& costs, const int64_t (&targets)[kTargets],
                              Found (&found)[kTargets]) {
    Range ranges[kTargets] = {{0, bags.count}, {0, bags.count}};
    while (!ranges[0].found || !ranges[1].found) {
      released_.order();
      for (int64_t t = 0; t < kTargets; ++t) copy_offsets(bags, &ranges[t], t);
      arrived_.order();
      for (int64_t t = 0; t < kTargets; ++t) narrow(costs, targets[t], t, &ranges[t], &found[t]);
    }
  }

 private:
  static constexpr int64_t kPitch =
      kUbBlock / sizeof(int64_t);  // of samples in UB: each has a block of its own
  static_assert(kSamples * kPitch <= kWindow, "samples fit where a window does");

  // The bag is one of [low, high]. In UB are `taken` offsets: those of bags start, start + step, ...
  struct Range {
    int64_t low, high;
    bool found = false;
    int64_t start = 0, step = 1, taken = 0;
  };

  __aicore__ inline void copy_offsets(const Bags& bags, Range* range, int64_t target) {
    if (range->found) return;
    const LocalTensor<int64_t> to = window(target);
    if (range->high - range->low + 2 <= kWindow) {  // with the bag before
      range->start = maximum<int64_t>(0, range->low - 1);
      range->step = 1;
      range->taken = range->high + 1 - range->start;
      load(to, bags.offsets + range->start, range->taken);
    } else {
      range->start = range->low;
      range->step = ceil_div(range->high - range->low, kSamples);
      range->taken = ceil_div(range->high - range->low, range->step);
      load_rows(to, bags.offsets + range->start, range->taken, 1, range->step, kPitch);
    }
  }

  __aicore__ inline void narrow(const BagCosts& costs, int64_t cost, int64_t target, Range* range,
                                Found* found) {
    if (range->found) return;
    const LocalTensor<int64_t> offsets = window(target);
    const int64_t pitch = range->step == 1 ? 1 : kPitch;
    int64_t low = 0, high = range->taken;  // how many of the offsets lie below the target
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      const int64_t offset = offsets.GetValue(static_cast<uint32_t>(middle * pitch));
      if (costs.before(range->start + middle * range->step, offset) < cost) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (range->step == 1) {
      range->found = true;
      found->bag = range->start + low;
      found->first = offsets.GetValue(static_cast<uint32_t>(low));
      found->first_of_previous = low > 0 ? offsets.GetValue(static_cast<uint32_t>(low - 1)) : 0;
      return;
    }
    if (low < range->taken) range->high = range->start + low * range->step;
    if (low > 0) range->low = range->start + (low - 1) * range->step + 1;
  }

  __aicore__ inline LocalTensor<int64_t> window(int64_t target) {
    return buffer_.Get<int64_t>()[static_cast<uint32_t>(target * kWindow)];
  }

  Landing buffer_;
  Signal<HardEvent::MTE2_S> arrived_;
  Signal<HardEvent::S_MTE2> released_;
};

// Walks bags in order: where bag k lies in the output, and how it is pooled.
class BagWalk {
 public:
  static constexpr int64_t kOffsets = 512, kFeatures = 64;
  static constexpr uint32_t kBytes = ScalarStream<int64_t, kOffsets>::kBytes +
                                     ScalarStream<int64_t, kFeatures>::kBytes +
                                     ScalarStream<uint8_t, kFeatures>::kBytes;

  __aicore__ inline void init(TPipe* pipe) {
    offsets_.init(pipe);
    columns_.init(pipe);
    means_.init(pipe);
  }

  // Bags [begin, end), begin < end; all of them must be walked.
  __aicore__ inline void start(const Bags& bags, int64_t begin, int64_t end) {
    batch_size_ = bags.batch_size;
    const int64_t first = bags.first_bag + begin, last = bags.first_bag + end - 1;
    feature_ = first / batch_size_;
    sample_ = first % batch_size_;
    offsets_.start(bags.offsets, begin, end + 1);
    columns_.start(bags.columns, feature_, last / batch_size_ + 1);
    means_.start(reinterpret_cast<const uint8_t*>(bags.mean), feature_, last / batch_size_ + 1);
    bag_ = begin;
    end_ = offsets_.at(begin);
    read_feature();
    read_bag();
  }

  __aicore__ inline void next() {
    ++bag_;
    if (++sample_ == batch_size_) {
      sample_ = 0;
      ++feature_;
      read_feature();
    }
    read_bag();
  }

  __aicore__ inline int64_t bag() const { return bag_; }
  __aicore__ inline int64_t first() const { return first_; }  // lookups [first, last)
  __aicore__ inline int64_t last() const { return end_; }
  __aicore__ inline int64_t length() const { return end_ - first_; }
  __aicore__ inline int64_t sample() const { return sample_; }
  __aicore__ inline int64_t column() const { return column_; }
  __aicore__ inline bool mean() const { return mean_; }

 private:
  __aicore__ inline void read_feature() {
    column_ = columns_.at(feature_);
    mean_ = means_.at(feature_) != 0;
  }

  __aicore__ inline void read_bag() {
    first_ = end_;
    end_ = offsets_.at(bag_ + 1);
  }

  ScalarStream<int64_t, kOffsets> offsets_;
  ScalarStream<int64_t, kFeatures> columns_;
  ScalarStream<uint8_t, kFeatures> means_;
  int64_t batch_size_ = 1, feature_ = 0, sample_ = 0, bag_ = 0;
  int64_t first_ = 0, end_ = 0, column_ = 0;
  bool mean_ = false;
};

}  // namespace ascendc
}  // namespace rec_sdk
