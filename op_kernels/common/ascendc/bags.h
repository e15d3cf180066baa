// Device side: divides the bags of a pooled lookup among cores, and computes the position of each bag in the
// output.
#pragma once

#include "op_kernels/common/ascendc/scalar_stream.h"
#include "op_kernels/common/ascendc/sorted_search.h"

namespace rec_sdk {
namespace ascendc {

// The bytes moved per lookup and per bag; bags [0, k) cost offsets[k] * lookup + k * bag.
struct BagCosts {
  int64_t lookup, bag;

  __aicore__ inline int64_t before(int64_t bags, int64_t offset) const {
    return offset * lookup + bags * bag;
  }
};

// Finds both ends of a core's share in `offsets` [count + 1].
class BagSearch {
 public:
  static constexpr int64_t kTargets = 2;
  static constexpr uint32_t kBytes = SortedSearch<128>::kBytes;

  // An end of a share: the first bag such that all earlier bags together cost at least the target (bags.count
  // if there is none), the start of its lookups, and the start of the previous bag's lookups (0 for bag 0).
  struct Found {
    int64_t bag, first, first_of_previous;
  };

  __aicore__ inline void init(TPipe* pipe) { search_.init(pipe); }

  // Finds the bag of each target. Precondition: 0 <= targets <= the cost of all bags.
  __aicore__ inline void find(const Bags& bags, const BagCosts& costs, const int64_t (&targets)[kTargets],
                              Found (&found)[kTargets]) {
    const SearchedArray<int64_t> offsets{bags.offsets, bags.count + 1, 0, bags.count};
    FoundPlace<int64_t, 1> places[kTargets];
    search_.find({offsets, offsets}, Below{costs, {targets[0], targets[1]}}, places);
    for (int64_t t = 0; t < kTargets; ++t) {
      found[t] = {places[t].place, places[t].here[0], places[t].before[0]};
    }
  }

 private:
  struct Below {
    BagCosts costs;
    int64_t targets[kTargets];
    template <class Values>
    __aicore__ inline bool operator()(int64_t t, int64_t bag, const Values& offset) const {
      return costs.before(bag, offset.get(0)) < targets[t];
    }
  };

  SortedSearch<128> search_;
};

// Iterates over bags in order, with the position of each bag in the output and its pooling.
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

  // Starts with bags [begin, end), begin < end; all of them must be visited.
  __aicore__ inline void start(const Bags& bags, int64_t begin, int64_t end) {
    batch_size_ = bags.batch_size;
    const int64_t first = bags.first_bag + begin, last = bags.first_bag + end - 1;
    feature_ = first / batch_size_;
    sample_ = first % batch_size_;
    offsets_.start(bags.offsets, begin, end + 1);
    columns_.start(bags.columns, feature_, last / batch_size_ + 1);
    means_.start(reinterpret_cast<const uint8_t*>(bags.mean), feature_, last / batch_size_ + 1);
    bag_ = begin;
    behind_last_ = end;
    first_ = offsets_.at(begin);
    last_ = offsets_.at(begin + 1);
    read_feature();
  }

  __aicore__ inline bool at_end() const { return bag_ == behind_last_; }

  // Returns at least one bag end in UB: the ends of consecutive bags of this feature, from this bag on.
  __aicore__ inline typename ScalarStream<int64_t, kOffsets>::Run ends() {
    return offsets_.run(bag_ + 1, minimum(batch_size_ - sample_, behind_last_ - bag_));
  }

  // Skips `count` bags, at most as many as ends() returned; the last one ends at lookup `last`.
  __aicore__ inline void skip(int64_t count, int64_t last) {
    bag_ += count;
    sample_ += count;
    first_ = last;
    if (at_end()) return;
    last_ = offsets_.at(bag_ + 1);
    if (sample_ < batch_size_) return;
    sample_ = 0;
    ++feature_;
    read_feature();
  }
  __aicore__ inline void next() { skip(1, last_); }

  __aicore__ inline int64_t bag() const { return bag_; }
  __aicore__ inline int64_t first() const { return first_; }  // the bag's lookups are [first, last)
  __aicore__ inline int64_t last() const { return last_; }
  __aicore__ inline int64_t length() const { return last_ - first_; }
  __aicore__ inline int64_t sample() const { return sample_; }
  __aicore__ inline int64_t column() const { return column_; }
  __aicore__ inline bool mean() const { return mean_; }

 private:
  __aicore__ inline void read_feature() {
    column_ = columns_.at(feature_);
    mean_ = means_.at(feature_) != 0;
  }

  ScalarStream<int64_t, kOffsets> offsets_;
  ScalarStream<int64_t, kFeatures> columns_;
  ScalarStream<uint8_t, kFeatures> means_;
  int64_t batch_size_ = 1, feature_ = 0, sample_ = 0, bag_ = 0, behind_last_ = 0;
  int64_t first_ = 0, last_ = 0, column_ = 0;
  bool mean_ = false;
};

}  // namespace ascendc
}  // namespace rec_sdk
