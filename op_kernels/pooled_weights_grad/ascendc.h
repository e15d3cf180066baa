#pragma once

#include "op_kernels/common/ascendc/bags.h"
#include "op_kernels/common/ascendc/lane_sums.h"
#include "op_kernels/common/ascendc/one_mask.h"
#include "op_kernels/common/ascendc/signal.h"
#include "op_kernels/common/ascendc/stored_rows.h"

namespace rec_sdk {
namespace ascendc {

// Ring of the divisors of a tile's lookups. The scalar unit writes them while the vector unit may still use
// the divisors of previous tiles.
class Divisors {
 public:
  static constexpr uint32_t kRing = 4;
  static constexpr uint32_t kBytesOfRow = kRing * sizeof(float);

  __aicore__ inline void init(TPipe* pipe, int64_t rows) {
    rows_ = rows;
    pipe->InitBuffer(buffer_, static_cast<uint32_t>(kRing * rows * sizeof(float)));
    for (uint32_t i = 0; i < kRing; ++i) {
      written_[i].init(pipe);
      used_[i].init(pipe);
    }
  }

  __aicore__ inline void begin_tile(uint32_t tile) {
    if (tile >= kRing) used_[tile % kRing].wait();
    divides_[tile % kRing] = false;
  }

  // Sets the divisors of rows [begin, end) of the tile; the divisors of earlier rows are already set.
  __aicore__ inline void set(uint32_t tile, int64_t begin, int64_t end, bool divides, float divisor) {
    bool& tile_divides = divides_[tile % kRing];
    if (divides && !tile_divides) {
      tile_divides = true;
      fill(tile, 0, begin, 1.0f);
    }
    if (tile_divides) fill(tile, begin, end, divides ? divisor : 1.0f);
  }

  __aicore__ inline void apply(uint32_t tile, const LocalTensor<float>& values, int64_t rows) {
    if (divides_[tile % kRing]) {
      written_[tile % kRing].order();
      vector_barrier();
      AscendC::Div(values, values, of(tile), static_cast<int32_t>(rows));
    }
    used_[tile % kRing].set();
  }

  __aicore__ inline void finish(uint32_t tiles) {
    for (uint32_t tile = tiles > kRing ? tiles - kRing : 0; tile < tiles; ++tile) {
      used_[tile % kRing].wait();
    }
  }

 private:
  __aicore__ inline LocalTensor<float> of(uint32_t tile) {
    return buffer_.Get<float>()[tile % kRing * static_cast<uint32_t>(rows_)];
  }
  __aicore__ inline void fill(uint32_t tile, int64_t begin, int64_t end, float value) {
    for (int64_t i = begin; i < end; ++i) of(tile).SetValue(static_cast<uint32_t>(i), value);
  }

  int64_t rows_ = 0;
  Landing buffer_;
  Signal<HardEvent::V_S> used_[kRing];
  Signal<HardEvent::S_V> written_[kRing];
  bool divides_[kRing] = {};
};

// The bags of a tile's lookups, and runs of bags whose gradients are `stride` values apart, which one copy
// loads. Holds two tiles, because one tile is loaded ahead.
class TileBags {
 public:
  static constexpr uint32_t kTiles = 2;
  static constexpr uint32_t kBytesOfBag = kTiles * (2 * sizeof(int32_t) + sizeof(int64_t));

  // bags: the maximum number of bags of a tile.
  __aicore__ inline void init(TPipe* pipe, int64_t bags, int64_t stride) {
    most_ = static_cast<uint32_t>(bags);
    // If gradients are too far apart for one copy, each has its own run: with a step of 0, no gradient
    // continues the run of the previous one.
    to_next_ = stride * static_cast<int64_t>(sizeof(float)) <= kMaxGap ? stride : 0;
    pipe->InitBuffer(ends_, static_cast<uint32_t>(kTiles * bags * sizeof(int32_t)));
    pipe->InitBuffer(first_bags_, static_cast<uint32_t>(kTiles * bags * sizeof(int32_t)));
    pipe->InitBuffer(gradients_, static_cast<uint32_t>(kTiles * bags * sizeof(int64_t)));
  }

  // The bags of a tile while they are listed. The scalar unit limits the speed of that loop.
  struct List {
    LocalTensor<int32_t> ends, first_bags;
    LocalTensor<int64_t> gradients;
    uint32_t bags, runs;
    int64_t next, to_next;

    // Appends a bag. end: one past its last row in the tile; gradient: where its gradient starts, in values.
    __aicore__ inline void append(int64_t end, int64_t gradient) {
      if (gradient != next) {
        first_bags.SetValue(runs, static_cast<int32_t>(bags));
        gradients.SetValue(runs++, gradient);
      }
      next = gradient + to_next;
      ends.SetValue(bags++, static_cast<int32_t>(end));
    }
  };
  __aicore__ inline List begin_tile(uint32_t tile) {
    return {ends(tile), first_bags(tile), gradients(tile), 0, 0, -1, to_next_};
  }
  __aicore__ inline void end_tile(uint32_t tile, const List& list) {
    bags_[tile % kTiles] = list.bags;
    runs_[tile % kTiles] = list.runs;
  }

  __aicore__ inline uint32_t count(uint32_t tile) const { return bags_[tile % kTiles]; }
  // [count]: one past the last row of each bag of the tile.
  __aicore__ inline LocalTensor<int32_t> ends(uint32_t tile) { return ends_.Get<int32_t>()[place(tile)]; }

  __aicore__ inline uint32_t runs(uint32_t tile) const { return runs_[tile % kTiles]; }
  // [runs]: the first bag of each run, and where its gradient starts, in values.
  __aicore__ inline LocalTensor<int32_t> first_bags(uint32_t tile) {
    return first_bags_.Get<int32_t>()[place(tile)];
  }
  __aicore__ inline LocalTensor<int64_t> gradients(uint32_t tile) {
    return gradients_.Get<int64_t>()[place(tile)];
  }

 private:
  __aicore__ inline uint32_t place(uint32_t tile) const { return tile % kTiles * most_; }

  int64_t to_next_ = 0;
  uint32_t most_ = 0, bags_[kTiles] = {}, runs_[kTiles] = {};
  Scratch ends_, first_bags_;
  Landing gradients_;
};

// Computes one value for each lookup of a tile, from its row and the gradient of its bag. Wide rows take
// several loads, and are summed panel by panel. Rows of 16-bit values are widened without gaps, and only the
// products of a panel have the wider pitch. So one load may contain several panels, with one copy per row.
template <class Stored>
class WeightsGradient {
 public:
  __aicore__ inline void run(TPipe* pipe, const PooledWeightsGrad& a) {
    a_ = a;
    walk_.init(pipe);
    search_.init(pipe);
    Position begin, end;
    find_share(&begin, &end);
    begin_ = begin.lookup;
    end_ = end.lookup;
    if (begin_ == end_) return;
    plan_tiles();
    init_buffers(pipe);
    slots_.start(a.slots, begin_, end_);
    walk_.start(a.bags, begin.bag, end.bag + 1);
    compute();
    divisors_.finish(tiles_);
    while (walk_.bag() < end.bag) walk_.next();
  }

 private:
  static constexpr int64_t kSlots = 1024;
  static constexpr int64_t kRowUnit = kUbBlock / sizeof(float);  // rows of a tile
  static constexpr bool kWidens = sizeof(Stored) != sizeof(float);
  static constexpr int64_t kWidestPanel = 240, kWidestLoad = kWidens ? 512 : kWidestPanel;  // columns
  static constexpr int64_t kShare = 16;  // the bags of a tile are planned in 16ths of its rows
  // Bytes of UB: per column of a row without its products, per column of the products, and per row.
  static constexpr int64_t kBytesOfValue = kWidens ? 2 * sizeof(Stored) + sizeof(float) : 0;
  static constexpr int64_t kBytesOfProduct = kWidens ? sizeof(float) : 2 * sizeof(float);
  static constexpr int64_t kBytesOfRow =
      (LaneSums::floats_of_row(1) + 2) * sizeof(float) + Divisors::kBytesOfRow;
  static constexpr int64_t kBytesOfGradient =
      2 * sizeof(float);  // bytes of UB per column of a bag's gradient
  static constexpr int64_t kOtherBytes =
      ScalarStream<int32_t, kSlots>::kBytes + BagWalk::kBytes + BagSearch::kBytes + 3 * kUbBlock;
  static_assert(kRowUnit * (kWidestLoad * (kBytesOfValue + kBytesOfGradient) +
                            (kWidestPanel + kWidthMultiple) * kBytesOfProduct + kBytesOfRow +
                            TileBags::kBytesOfBag) +
                        kOtherBytes <=
                    kUbBytes,
                "UB");

  struct Position {
    int64_t bag, lookup;  // the lookup is in the bag, or is the one after its last lookup
  };

  // Finds the core's share of the lookups, measured in bytes to move. Bags may be cut.
  __aicore__ inline void find_share(Position* begin, Position* end) {
    constexpr int64_t kIndexBytes = sizeof(int32_t), kOffsetBytes = sizeof(int64_t),
                      kValueBytes = sizeof(float);
    const BagCosts costs{a_.weights.dim * static_cast<int64_t>(sizeof(Stored)) + kIndexBytes + kValueBytes,
                         a_.weights.dim * kValueBytes + kOffsetBytes};
    const int64_t all = costs.before(a_.bags.count, a_.lookups);
    const int64_t core = AscendC::GetBlockIdx(), cores = AscendC::GetBlockNum();
    const int64_t targets[] = {all * core / cores, all * (core + 1) / cores};
    BagSearch::Found found[BagSearch::kTargets];
    search_.find(a_.bags, costs, targets, found);
    *begin = position(costs, found[0], targets[0]);
    *end = position(costs, found[1], targets[1]);
  }

  __aicore__ inline Position position(const BagCosts& costs, const BagSearch::Found& found,
                                      int64_t target) const {
    if (found.bag == 0) return {0, 0};
    const int64_t bag = found.bag - 1,
                  into_bag = target - costs.before(bag, found.first_of_previous) - costs.bag;
    const int64_t lookup = found.first_of_previous + maximum<int64_t>(0, into_bag) / costs.lookup;
    return {bag, minimum(found.first, lookup)};
  }

  // Returns the width of the fewest equal parts of the columns that are at most `widest` wide, each a
  // multiple of `unit`.
  __aicore__ inline static int64_t part_of(int64_t columns, int64_t widest, int64_t unit) {
    return align_up(ceil_div(columns, ceil_div(columns, align_down(widest, unit))), unit);
  }

  // Plans tiles of as many lookups as fit into UB, with space for the gradients of 25% more bags than the
  // average number for so many lookups.
  __aicore__ inline void plan_tiles() {
    const int64_t dim = a_.weights.dim;
    const int64_t unit = dim % OneMask::kRepeat == 0 ? OneMask::kRepeat : kWidthMultiple;
    load_ = part_of(dim, kWidestLoad, unit);
    panel_ = part_of(load_, kWidestPanel, unit);
    pitch_ = spread_pitch(panel_, kUbBlock / sizeof(Stored));
    const int64_t share =
        minimum(kShare, maximum<int64_t>(1, ceil_div(kShare * 5 * a_.bags.count, 4 * a_.lookups)));
    const int64_t of_row = load_ * kBytesOfValue + pitch_ * kBytesOfProduct + kBytesOfRow;
    const int64_t of_bag = load_ * kBytesOfGradient + TileBags::kBytesOfBag;
    const int64_t left = kUbBytes - kOtherBytes;
    // In the smallest tile each row may have its own bag. In other tiles the number of bags is rounded up.
    const int64_t fit =
        maximum(kRowUnit, quotient((left - of_bag) * kShare, kShare * of_row + share * of_bag));
    rows_ = tile_rows(align_down(fit, kRowUnit), end_ - begin_);
    rows_ = minimum(kSlots, maximum(kRowUnit, align_down(rows_, kRowUnit)));
    bags_of_tile_ = rows_ == kRowUnit ? rows_ : ceil_div(rows_ * share, kShare);
  }

  __aicore__ inline void init_buffers(TPipe* pipe) {
    const int64_t products = rows_ * pitch_ * static_cast<int64_t>(sizeof(float));
    if (kWidens) {
      pipe->InitBuffer(stored_, 2, static_cast<uint32_t>(rows_ * load_ * sizeof(Stored)));
      pipe->InitBuffer(widened_, static_cast<uint32_t>(rows_ * load_ * sizeof(float)));
      pipe->InitBuffer(products_, static_cast<uint32_t>(products));
    } else {
      pipe->InitBuffer(stored_, 2, static_cast<uint32_t>(products));
    }
    pipe->InitBuffer(gradients_, 2, static_cast<uint32_t>(bags_of_tile_ * load_ * sizeof(float)));
    pipe->InitBuffer(results_, 2, static_cast<uint32_t>(rows_ * sizeof(float)));
    slots_.init(pipe);
    lanes_.init(pipe, rows_, pitch_);
    divisors_.init(pipe, rows_);
    bags_.init(pipe, bags_of_tile_, a_.grad_stride);
  }

  // Lookups of a tile.
  struct Tile {
    int64_t first, rows;
  };
  // A part of the columns of a tile.
  struct Load {
    uint32_t tile;
    int64_t column;
  };

  __aicore__ inline void compute() {
    next_ = begin_;
    Load load{0, 0};
    load_columns(load);
    while (true) {
      const bool last_of_tile = load.column + load_ >= a_.weights.dim;
      const Load next = last_of_tile ? Load{load.tile + 1, 0} : Load{load.tile, load.column + load_};
      const bool last = last_of_tile && next_ == end_;
      if (!last) load_columns(next);
      if (load.column == 0) lanes_.begin(tile_of(load).rows);
      add_products(load);
      if (last_of_tile) store_tile(load.tile);
      if (last) break;
      load = next;
    }
    tiles_ = load.tile + 1;
  }

  __aicore__ inline const Tile& tile_of(const Load& load) const {
    return tiles_of_lookups_[load.tile % TileBags::kTiles];
  }
  __aicore__ inline int64_t width_of(const Load& load) const {
    return minimum(load_, a_.weights.dim - load.column);
  }

  __aicore__ inline void load_columns(const Load& load) {
    if (load.column == 0) list_bags(load.tile);
    const int64_t width = width_of(load);
    const Tile& tile = tile_of(load);
    LocalTensor<Stored> rows = stored_.template AllocTensor<Stored>();
    load_rows_of_weights(rows, row_pitch(width), a_.weights, &slots_, tile.first, tile.rows, load.column,
                         width);
    stored_.EnQue(rows);
    LocalTensor<float> gradients = gradients_.template AllocTensor<float>();
    load_gradients(load.tile, gradients, load.column, width);
    gradients_.EnQue(gradients);
  }

  __aicore__ inline void load_gradients(uint32_t tile, const LocalTensor<float>& to, int64_t column,
                                        int64_t width) {
    const LocalTensor<int32_t> first_bags = bags_.first_bags(tile);
    const LocalTensor<int64_t> gradients = bags_.gradients(tile);
    const uint32_t runs = bags_.runs(tile);
    int64_t first = 0;
    for (uint32_t run = 0; run < runs; ++run) {
      const int64_t end = run + 1 < runs ? first_bags.GetValue(run + 1) : bags_.count(tile);
      load_rows(to[static_cast<uint32_t>(first * load_)], a_.grad + gradients.GetValue(run) + column,
                end - first, width, a_.grad_stride, load_);
      first = end;
    }
  }

  // Returns the pitch of the loaded rows: rows that one instruction widens have no gaps.
  __aicore__ inline int64_t row_pitch(int64_t width) const {
    return kWidens ? align_up(width, kWidthMultiple) : pitch_;
  }

  // Lists the lookups and bags of the next tile, as many as fit. If several loads read the slots of the tile,
  // the slots must be in one chunk of their stream, which cannot move back.
  __aicore__ inline void list_bags(uint32_t tile) {
    int64_t most = minimum(rows_, end_ - next_), row = 0;
    if (load_ < a_.weights.dim) most = minimum(most, kSlots - remainder(next_ - begin_, kSlots));
    TileBags::List list = bags_.begin_tile(tile);
    divisors_.begin_tile(tile);
    while (row < most && list.bags < bags_of_tile_) row = list_run(tile, row, most, &list);
    bags_.end_tile(tile, list);
    tiles_of_lookups_[tile % TileBags::kTiles] = {next_, row};
    next_ += row;
  }

  // Lists bags from the current bag of walk_ on, whose ends are consecutive in UB, up to the end of the
  // tile's `rows` and at most as many as fit. Bags without lookups are skipped. Returns how many rows of the
  // tile have a bag now.
  __aicore__ inline int64_t list_run(uint32_t tile, int64_t row, int64_t rows, TileBags::List* list_of_tile) {
    const int64_t first = next_, stride = a_.grad_stride;
    const bool mean = walk_.mean();
    if (!mean) divisors_.set(tile, row, rows, false, 1.0f);  // at least for the next rows of this feature
    TileBags::List list = *list_of_tile;
    int64_t gradient = walk_.sample() * stride + walk_.column(), begin = walk_.first() - first, end = begin;
    const auto ends = walk_.ends();
    uint32_t ended = 0;
    const auto bags = static_cast<uint32_t>(minimum<int64_t>(ends.count, bags_of_tile_ - list.bags));
    for (; ended < bags; ++ended, gradient += stride) {
      end = ends.values.GetValue(ended) - first;
      const int64_t until = minimum(end, rows);
      if (until > row) {
        list.append(until, gradient);
        if (mean) divisors_.set(tile, row, until, true, static_cast<float>(end - begin));
        row = until;
      }
      if (end > rows) break;
      begin = end;
    }
    if (ended > 0) walk_.skip(ended, first + begin);
    *list_of_tile = list;
    return row;
  }

  __aicore__ inline void add_products(const Load& load) {
    const int64_t width = width_of(load);
    LocalTensor<Stored> stored = stored_.template DeQue<Stored>();
    LocalTensor<float> gradients = gradients_.template DeQue<float>();
    const LocalTensor<float> rows = as_floats(stored, tile_of(load).rows, width);
    for (int64_t column = 0; column < width; column += panel_) {
      const auto at = static_cast<uint32_t>(column);
      const int64_t columns = minimum(panel_, width - column);
      const LocalTensor<float> products = kWidens ? products_.template Get<float>() : rows;
      multiply(load.tile, products, rows[at], gradients[at],
               {static_cast<uint32_t>(columns), static_cast<uint32_t>(pitch_),
                static_cast<uint32_t>(row_pitch(width))});
      vector_barrier();
      lanes_.add(products, columns);
    }
    gradients_.FreeTensor(gradients);
    stored_.FreeTensor(stored);
  }

  // The columns to multiply, and the pitch of the products and of the loaded rows, in values.
  struct TileShape {
    uint32_t columns, pitch, row_pitch;
  };

  // Multiplies each row of the tile by the gradient of its bag. One instruction multiplies 64 columns of all
  // rows of a long bag.
  __aicore__ inline void multiply(uint32_t tile, LocalTensor<float> products, LocalTensor<float> rows,
                                  LocalTensor<float> gradients, const TileShape& shape) {
    constexpr auto kRepeat = static_cast<uint32_t>(OneMask::kRepeat);
    const uint32_t columns = shape.columns, to_next = static_cast<uint32_t>(load_);
    const uint32_t long_bag = columns % kRepeat == 0 ? columns / kRepeat + 2 : UINT32_MAX;  // 2: of masks
    const LocalTensor<int32_t> ends = bags_.ends(tile);
    uint32_t begin = 0, count = 0, step = 0;  // of the previous bag
    OneMask::begin(columns);
    for (uint32_t i = 0, bags = bags_.count(tile); i < bags; ++i) {
      products = products[count * shape.pitch];
      rows = rows[count * shape.row_pitch];
      gradients = gradients[step];
      const uint32_t end = static_cast<uint32_t>(ends.GetValue(i));
      count = end - begin;
      if (count >= long_bag) {
        multiply_columns(products, rows, gradients, count, shape);
      } else {
        multiply_rows(products, rows, gradients, count, shape);
      }
      step = to_next;
      begin = end;
    }
    OneMask::end();
  }

  __aicore__ inline static void multiply_columns(const LocalTensor<float>& products,
                                                 const LocalTensor<float>& rows,
                                                 const LocalTensor<float>& gradient, uint32_t count,
                                                 const TileShape& shape) {
    constexpr uint32_t kFloats = kUbBlock / sizeof(float);
    const auto to_next = static_cast<uint8_t>(shape.pitch / kFloats),
               row_to_next = static_cast<uint8_t>(shape.row_pitch / kFloats);
    OneMask::go_on(count * OneMask::kRepeat);
    for (uint32_t column = 0; column < shape.columns; column += OneMask::kRepeat) {
      OneMask::multiply_repeats(products[column], gradient[column], rows[column], to_next, row_to_next);
    }
  }
  __aicore__ inline static void multiply_rows(const LocalTensor<float>& products,
                                              const LocalTensor<float>& rows,
                                              const LocalTensor<float>& gradient, uint32_t count,
                                              const TileShape& shape) {
    OneMask::go_on(shape.columns);
    for (uint32_t i = 0; i < count; ++i) {
      OneMask::multiply(products[i * shape.pitch], gradient, rows[i * shape.row_pitch]);
    }
  }

  __aicore__ inline LocalTensor<float> as_floats(const LocalTensor<Stored>& stored, int64_t rows,
                                                 int64_t width) {
    if constexpr (kWidens) {
      const LocalTensor<float> floats = widened_.template Get<float>();
      widen(floats, stored, rows * row_pitch(width));
      vector_barrier();
      return floats;
    } else {
      return stored;
    }
  }

  __aicore__ inline void store_tile(uint32_t tile) {
    const auto [first, rows] = tiles_of_lookups_[tile % TileBags::kTiles];
    LocalTensor<float> results = results_.template AllocTensor<float>();
    lanes_.finish(results);
    divisors_.apply(tile, results, rows);
    results_.EnQue(results);
    LocalTensor<float> stored = results_.template DeQue<float>();
    store(a_.out + first, stored, rows);
    results_.FreeTensor(stored);
  }

  PooledWeightsGrad a_{};
  int64_t begin_ = 0, end_ = 0, next_ = 0;               // next_: the first lookup that is in no tile yet
  int64_t load_ = 0, panel_ = 0, pitch_ = 0, rows_ = 0;  // columns, and rows of the largest tile
  int64_t bags_of_tile_ = 0;                             // at most
  uint32_t tiles_ = 0;
  Tile tiles_of_lookups_[TileBags::kTiles] = {};
  AscendC::TQue<TPosition::VECIN, 2> stored_, gradients_;
  AscendC::TQue<TPosition::VECOUT, 2> results_;
  Scratch widened_, products_;
  ScalarStream<int32_t, kSlots> slots_;
  BagWalk walk_;
  BagSearch search_;
  LaneSums lanes_;
  Divisors divisors_;
  TileBags bags_;
};

__aicore__ inline void pooled_weights_grad(const PooledWeightsGrad& a) {
  TPipe pipe;
  if (a.weights.dtype == DType::kFloat16) {
    WeightsGradient<half> gradient;
    gradient.run(&pipe, a);
  } else if (a.weights.dtype == DType::kBFloat16) {
    WeightsGradient<BFloat16> gradient;
    gradient.run(&pipe, a);
  } else {
    WeightsGradient<float> gradient;
    gradient.run(&pipe, a);
  }
}

}  // namespace ascendc
}  // namespace rec_sdk
