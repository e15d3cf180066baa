#pragma once

#include "op_kernels/common/ascendc/bags.h"
#include "op_kernels/common/ascendc/stored_rows.h"
#include "op_kernels/lookup_pooled/ascendc_group.h"

namespace rec_sdk {
namespace ascendc {

// A panel of columns of the rows of consecutive lookups, as fp32 in UB. One tile of rows is loaded while the
// previous tile is summed.
template <class StoredType, class Source>
class RowTiles {
 public:
  using Stored = StoredType;
  static constexpr int64_t kSlots = 1024;
  static constexpr bool kWidens = sizeof(Stored) != sizeof(float);
  static constexpr int64_t kBytesOfValue = 2 * sizeof(Stored) + (kWidens ? sizeof(float) : 0);
  static constexpr uint32_t kBytes = ScalarStream<int32_t, kSlots>::kBytes;  // UB besides the tiles

  // width: columns of the widest panel; lookups: approximate number of rows of this core; bytes: UB for the
  // tiles.
  __aicore__ inline void init(TPipe* pipe, const Source& weights, const int32_t* slots, int64_t width,
                              int64_t lookups, int64_t bytes) {
    weights_ = weights;
    slots_array_ = slots;
    const int64_t pitch = align_up(width, kWidthMultiple);
    rows_of_tile_ = tile_rows(bytes / (pitch * kBytesOfValue), lookups);
    pipe->InitBuffer(stored_, 2, static_cast<uint32_t>(rows_of_tile_ * pitch * sizeof(Stored)));
    if (kWidens) pipe->InitBuffer(widened_, static_cast<uint32_t>(rows_of_tile_ * pitch * sizeof(float)));
    slots_.init(pipe);
  }

  // Starts with columns [column, column + width) of lookups [begin, end); take() must then reach the last
  // row.
  __aicore__ inline void start(int64_t begin, int64_t end, int64_t column, int64_t width) {
    slots_.start(slots_array_, begin, end);
    next_load_ = begin;
    end_ = end;
    column_ = column;
    width_ = width;
    pitch_ = align_up(width, kWidthMultiple);  // no gap between rows, which a whole tile's Cast would read
    load_tile();
  }

  // Loads the next tile if all rows were taken. Returns how many rows take() may return, 1 to `wanted`.
  __aicore__ inline int64_t available(int64_t wanted) {
    if (used_ == in_tile_) next_tile();
    return minimum(wanted, in_tile_ - used_);
  }

  __aicore__ inline int64_t pitch() const { return pitch_; }

  // Returns the next `rows` rows, at most as many as available() returned. They are valid until the next call
  // of available().
  __aicore__ inline LocalTensor<float> take(int64_t rows = 1) {
    const LocalTensor<float> first = rows_[static_cast<uint32_t>(used_ * pitch_)];
    used_ += rows;
    return first;
  }

  // Returns the number of rows in UB that were not taken.
  __aicore__ inline int64_t held() const { return in_tile_ - used_; }

  // Called after the last row was taken.
  __aicore__ inline void finish() {
    if (in_tile_ > 0) release();
  }

 private:
  __aicore__ inline void next_tile() {
    if (in_tile_ > 0) release();
    in_tile_ = loaded_;
    load_tile();
    current_ = stored_.template DeQue<Stored>();
    if constexpr (kWidens) {
      rows_ = widened_.template Get<float>();
      vector_barrier();  // the sums must have read the previous rows
      widen(rows_, current_, in_tile_ * pitch_);
      vector_barrier();
    } else {
      rows_ = current_;
    }
  }

  __aicore__ inline void load_tile() {
    loaded_ = minimum(rows_of_tile_, end_ - next_load_);
    if (loaded_ <= 0) return;
    LocalTensor<Stored> tile = stored_.template AllocTensor<Stored>();
    load_rows_of_weights(tile, pitch_, weights_, &slots_, next_load_, loaded_, column_, width_);
    stored_.EnQue(tile);
    next_load_ += loaded_;
  }

  __aicore__ inline void release() {
    stored_.FreeTensor(current_);
    in_tile_ = 0;
    used_ = 0;
  }

  Source weights_{};
  const int32_t* slots_array_ = nullptr;
  int64_t pitch_ = 0, rows_of_tile_ = 0;
  int64_t next_load_ = 0, end_ = 0, column_ = 0, width_ = 0;
  int64_t loaded_ = 0, in_tile_ = 0, used_ = 0;
  AscendC::TQue<TPosition::VECIN, 2> stored_;
  Scratch widened_;
  ScalarStream<int32_t, kSlots> slots_;
  LocalTensor<Stored> current_;
  LocalTensor<float> rows_;
};

// The output slices of bags. Slices of consecutive bags of a feature are one output row apart, and one DMA
// stores them together.
class PooledOutput {
 public:
  static constexpr int64_t kTile = 2048;  // values
  static constexpr uint32_t kBytes = 2 * kTile * sizeof(float);

  __aicore__ inline void init(TPipe* pipe, float* out, int64_t out_stride, int64_t width) {
    out_ = out;
    out_stride_ = out_stride;
    pitch_ = align_up(width, kWidthMultiple);
    const bool far = (out_stride - 1) * static_cast<int64_t>(sizeof(float)) > kMaxGap;
    rows_of_tile_ = far ? 1 : kTile / pitch_;
    pipe->InitBuffer(tiles_, 2, static_cast<uint32_t>(rows_of_tile_ * pitch_ * sizeof(float)));
  }

  __aicore__ inline void start(int64_t width) { width_ = width; }

  // Prepares for slices that start at out[sample, column:], and stores earlier slices if these cannot join
  // them. Returns how many slices take() may then return, at least 1.
  __aicore__ inline int64_t make_room(int64_t sample, int64_t column) {
    const bool joins = rows_ < rows_of_tile_ && column == column_ && sample == sample_ + rows_;
    if (!joins) flush();
    if (rows_ == 0) {
      sample_ = sample;
      column_ = column;
    }
    return rows_of_tile_ - rows_;
  }

  // Returns the UB of the next slices, which are one pitch apart.
  __aicore__ inline LocalTensor<float> take(int64_t slices) {
    if (rows_ == 0) tile_ = tiles_.AllocTensor<float>();
    const LocalTensor<float> first = tile_[static_cast<uint32_t>(rows_ * pitch_)];
    rows_ += slices;
    return first;
  }

  __aicore__ inline void flush() {
    if (rows_ == 0) return;
    tiles_.EnQue(tile_);
    LocalTensor<float> tile = tiles_.DeQue<float>();
    store_rows(out_ + sample_ * out_stride_ + column_, tile, rows_, width_, out_stride_, pitch_);
    tiles_.FreeTensor(tile);
    rows_ = 0;
  }

 private:
  float* out_ = nullptr;
  int64_t out_stride_ = 0, pitch_ = 0, rows_of_tile_ = 0, width_ = 0;
  int64_t rows_ = 0, sample_ = 0, column_ = 0;
  AscendC::TQue<TPosition::VECOUT, 2> tiles_;
  LocalTensor<float> tile_;
};

// Sums of rows in the order of aggregate.h: blocks of 32 rows, whose sums are combined on a stack like the
// carries of a binary counter. Sample weights are scalar operands of the vector instructions.
template <class Tiles, bool kWeighted>
class BagSum {
 public:
  static constexpr int64_t kSumBlock = 32;  // rows added one after the other: kBlock of aggregate.h
  static constexpr int64_t kWeights = 1024;
  static constexpr uint32_t kBytes = kWeighted ? ScalarStream<float, kWeights>::kBytes : 0;

  __aicore__ inline void init(TPipe* pipe, const LookupPooled& a, int64_t width) {
    weights_array_ = a.per_sample_weights;
    pitch_ = align_up(width, kWidthMultiple);
    const int64_t levels = levels_for(a.lookups);
    pipe->InitBuffer(stack_, static_cast<uint32_t>(levels * pitch_ * sizeof(float)));
    if (kWeighted) weights_.init(pipe);
  }

  // Returns the stack levels for the longest possible bag, which has all lookups.
  static __aicore__ inline int64_t levels_for(int64_t lookups) {
    return 1 + floor_log2(maximum<int64_t>(1, ceil_div(lookups, kSumBlock)));
  }

  __aicore__ inline void start(int64_t begin, int64_t end, int64_t width) {
    if (kWeighted) weights_.start(weights_array_, begin, end);
    lookup_ = begin;
    width_ = static_cast<int32_t>(width);
  }

  // Multiplies the next `length` rows of the tile by their weights, and returns the first of them.
  __aicore__ inline LocalTensor<float> take_rows(Tiles* rows, int64_t length) {
    if (!kWeighted) return rows->take(length);
    OneMask::begin(width_);
    const LocalTensor<float> first = rows->take();
    OneMask::scale(first, next_weight());
    for (int64_t i = 1; i < length; ++i) OneMask::scale(rows->take(), next_weight());
    OneMask::end();
    return first;
  }

  // Writes the sum of the next `length` rows to `sum`; length >= 1.
  __aicore__ inline void add_up(Tiles* rows, int64_t length, const LocalTensor<float>& sum) {
    const int64_t blocks = ceil_div(length, kSumBlock);
    if (blocks == 1) return sum_block(rows, length, sum);
    int32_t depth = 0;
    for (int64_t i = 0; i < blocks; ++i) {
      sum_block(rows, minimum(kSumBlock, length - i * kSumBlock), level(depth++));
      if (i + 1 == blocks) break;
      for (int64_t carry = i; carry & 1; carry >>= 1) depth = fold(depth, level(depth - 2));
    }
    while (depth > 2) depth = fold(depth, level(depth - 2));
    fold(depth, sum);
  }

 private:
  __aicore__ inline LocalTensor<float> level(int32_t depth) {
    return stack_.Get<float>()[static_cast<uint32_t>(depth * pitch_)];
  }

  // Adds the two sums on top of the stack; returns the new depth.
  __aicore__ inline int32_t fold(int32_t depth, const LocalTensor<float>& to) {
    vector_barrier();
    AscendC::Add(to, level(depth - 2), level(depth - 1), width_);
    return depth - 1;
  }

  __aicore__ inline void sum_block(Tiles* rows, int64_t length, const LocalTensor<float>& sum) {
    for (int64_t done = 0; done < length;) {
      const int64_t taken = rows->available(length - done);
      add_rows(rows, taken, done == 0, sum);
      done += taken;
    }
  }

  // The first row of a block is copied, or added to the second: a sum that starts from zero would lose the
  // sign of -0.
  __aicore__ inline void add_rows(Tiles* rows, int64_t count, bool first_of_block,
                                  const LocalTensor<float>& sum) {
    int64_t i = 0;
    OneMask::begin(width_);
    if (first_of_block) {
      vector_barrier();
      if (kWeighted) {
        OneMask::scale_to(sum, rows->take(), next_weight());
        i = 1;
      } else if (count == 1) {
        OneMask::copy(sum, rows->take());
        i = 1;
      } else {
        const LocalTensor<float> first = rows->take();
        OneMask::add(sum, first, rows->take());
        i = 2;
      }
    }
    for (; i < count; ++i) {
      const LocalTensor<float> row = rows->take();
      if (kWeighted) OneMask::scale(row, next_weight());
      vector_barrier();
      OneMask::add(sum, sum, row);
    }
    OneMask::end();
  }

  __aicore__ inline float next_weight() {
    if constexpr (kWeighted) return weights_.at(lookup_++);
    return 1.0f;
  }

  const float* weights_array_ = nullptr;
  int64_t pitch_ = 0, lookup_ = 0;
  int32_t width_ = 0;
  Scratch stack_;
  ScalarStream<float, kWeights> weights_;
};

// Pools the bags of one core. All cores have shares of consecutive bags that move equally many bytes. A long
// bag across the end of a share is cut by columns: this core pools the left columns, the next core the
// others.
template <class Tiles, bool kWeighted>
class PooledLookup {
 public:
  template <class Source>
  __aicore__ inline void run(TPipe* pipe, const Source& weights, const LookupPooled& a) {
    a_ = a;
    panel_ = align_up(ceil_div(a.weights.dim, ceil_div(a.weights.dim, kWidestPanel)), kWidthMultiple);
    output_.init(pipe, a.out, a.out_stride, panel_);
    sums_.init(pipe, a, panel_);
    group_.init(pipe, panel_);
    walk_.init(pipe);
    search_.init(pipe);
    pipe->InitBuffer(divisor_, static_cast<uint32_t>(panel_ * sizeof(float)));
    const int64_t left = kUbBytes - kOtherBytes - (sums_.levels_for(a.lookups) + 1) * panel_ * 4;
    tiles_.init(pipe, weights, a.slots, panel_, ceil_div(a.lookups, AscendC::GetBlockNum()), left);

    Position begin, end;
    find_share(&begin, &end);
    pool_share(begin, end);
  }

 private:
  using Stored = typename Tiles::Stored;
  static constexpr int64_t kWidestPanel = 512;
  static constexpr int64_t kLevels = 28;  // 2^31 lookups are 2^26 blocks
  static constexpr int64_t kOtherBytes = Tiles::kBytes + PooledOutput::kBytes +
                                         BagSum<Tiles, kWeighted>::kBytes + BagGroup::kBytes +
                                         BagWalk::kBytes + BagSearch::kBytes;
  static_assert(kWidestPanel <= PooledOutput::kTile, "a row fits");
  static_assert(kOtherBytes + (kLevels + 1) * kWidestPanel * 4 + 8 * kWidestPanel * Tiles::kBytesOfValue <=
                    kUbBytes,
                "UB, with a tile of 8 rows");

  // An end of a share, before a column of a bag. The bag's lookups are [first, last); `last` is not set if
  // column is 0.
  struct Position {
    int64_t bag, column, first, last;
  };

  __aicore__ inline void find_share(Position* begin, Position* end) {
    constexpr int64_t kIndexBytes = sizeof(int32_t), kOffsetBytes = sizeof(int64_t);
    const BagCosts costs{a_.weights.dim * static_cast<int64_t>(sizeof(Stored)) + kIndexBytes,
                         a_.weights.dim * static_cast<int64_t>(sizeof(float)) + kOffsetBytes};
    const int64_t all = costs.before(a_.bags.count, a_.lookups);
    const int64_t core = AscendC::GetBlockIdx(), cores = AscendC::GetBlockNum();
    const int64_t targets[] = {all * core / cores, all * (core + 1) / cores};
    BagSearch::Found found[BagSearch::kTargets];
    search_.find(a_.bags, costs, targets, found);
    *begin = position(costs, all / cores, found[0], targets[0]);
    *end = position(costs, all / cores, found[1], targets[1]);
  }

  __aicore__ inline Position position(const BagCosts& costs, int64_t share, const BagSearch::Found& found,
                                      int64_t target) const {
    constexpr int64_t kWorthACut = 32;                   // part of a core's share that a bag must be
    constexpr int64_t kCut = kUbBlock / sizeof(Stored);  // columns
    if (found.bag == 0) return {0, 0, found.first, 0};
    const int64_t dim = a_.weights.dim, first = found.first_of_previous, bag = found.bag - 1;
    const int64_t into_bag = target - costs.before(bag, first);
    const int64_t cost = (found.first - first) * costs.lookup + costs.bag;
    if (into_bag == cost) return {found.bag, 0, found.first, 0};
    const int64_t unit = cost * kWorthACut < share ? dim : minimum(kCut, dim);
    const int64_t column = align_down(dim * into_bag / cost + unit / 2, unit);
    if (column >= dim) return {found.bag, 0, found.first, 0};
    return {bag, column, first, found.first};
  }

  __aicore__ inline void pool_share(const Position& begin, const Position& end) {
    const int64_t dim = a_.weights.dim;
    if (begin.bag == end.bag) {
      if (begin.column < end.column)
        pool(end.bag, end.bag + 1, end.first, end.last, begin.column, end.column);
      return;
    }
    const bool cut = begin.column > 0;
    if (cut) pool(begin.bag, begin.bag + 1, begin.first, begin.last, begin.column, dim);
    const int64_t whole = begin.bag + (cut ? 1 : 0);
    if (whole < end.bag) pool(whole, end.bag, cut ? begin.last : begin.first, end.first, 0, dim);
    if (end.column > 0) pool(end.bag, end.bag + 1, end.first, end.last, 0, end.column);
  }

  // Pools columns [left, right) of bags [begin, end), begin < end, panel by panel. The bags have lookups
  // [first, last).
  __aicore__ inline void pool(int64_t begin, int64_t end, int64_t first, int64_t last, int64_t left,
                              int64_t right) {
    for (int64_t column = left; column < right; column += panel_) {
      const int64_t width = minimum(panel_, right - column);
      walk_.start(a_.bags, begin, end);
      tiles_.start(first, last, column, width);
      sums_.start(first, last, width);
      output_.start(width);
      group_.start(width, tiles_.pitch());
      while (!walk_.at_end()) {
        if (!pool_group(walk_.column() + column))
          pool_next(walk_.column() + column, static_cast<int32_t>(width));
      }
      output_.flush();
      tiles_.finish();
    }
  }

  // Pools short bags side by side, from the current bag of walk_ on. Returns false if it pooled none: the
  // current bag is empty, long or not completely in the tile, or a group holds only one bag.
  __aicore__ inline bool pool_group(int64_t column) {
    if (group_.most() == 1) return false;
    if (walk_.length() > 0) tiles_.available(1);
    const auto ends = walk_.ends();
    const int64_t most = minimum(ends.count, output_.make_room(walk_.sample(), column));
    const int64_t bags = group_.list(walk_.first(), ends.values, most, tiles_.held());
    if (bags == 0) return false;
    const LocalTensor<float> sums = output_.take(bags);
    group_.add_up(sums, sums_.take_rows(&tiles_, group_.rows()), bags, walk_.mean());
    walk_.skip(bags, walk_.first() + group_.rows());
    return true;
  }

  // Pools the current bag of walk_.
  __aicore__ inline void pool_next(int64_t column, int32_t width) {
    output_.make_room(walk_.sample(), column);
    pool_bag(output_.take(1), width);
    walk_.next();
  }

  __aicore__ inline void pool_bag(const LocalTensor<float>& slice, int32_t width) {
    if (walk_.length() == 0) {
      AscendC::Duplicate(slice, 0.0f, width);
      return;
    }
    sums_.add_up(&tiles_, walk_.length(), slice);
    if (!walk_.mean()) return;
    const LocalTensor<float> divisor = divisor_.Get<float>();
    vector_barrier();
    AscendC::Duplicate(divisor, static_cast<float>(walk_.length()), width);
    vector_barrier();
    AscendC::Div(slice, slice, divisor, width);
  }

  LookupPooled a_{};
  int64_t panel_ = 0;
  Tiles tiles_;
  PooledOutput output_;
  BagSum<Tiles, kWeighted> sums_;
  BagGroup group_;
  BagWalk walk_;
  BagSearch search_;
  Scratch divisor_;
};

template <class Stored, class Source>
__aicore__ inline void lookup_pooled_of(const Source& weights, const LookupPooled& a) {
  TPipe pipe;
  if (a.per_sample_weights != nullptr) {
    PooledLookup<RowTiles<Stored, Source>, true> lookup;
    lookup.run(&pipe, weights, a);
  } else {
    PooledLookup<RowTiles<Stored, Source>, false> lookup;
    lookup.run(&pipe, weights, a);
  }
}

// weights: a.weights, or a StagedWeights that adds the rows of a staging buffer.
template <class Source>
__aicore__ inline void lookup_pooled_in(const Source& weights, const LookupPooled& a) {
  if (a.weights.dtype == DType::kFloat16) {
    lookup_pooled_of<half>(weights, a);
  } else if (a.weights.dtype == DType::kBFloat16) {
    lookup_pooled_of<BFloat16>(weights, a);
  } else {
    lookup_pooled_of<float>(weights, a);
  }
}

__aicore__ inline void lookup_pooled(const LookupPooled& a) { lookup_pooled_in(a.weights, a); }

}  // namespace ascendc
}  // namespace rec_sdk
