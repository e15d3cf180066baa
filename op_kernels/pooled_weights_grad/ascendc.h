#pragma once

#include "op_kernels/common/ascendc/bags.h"
#include "op_kernels/common/ascendc/lane_sums.h"
#include "op_kernels/common/ascendc/one_mask.h"
#include "op_kernels/common/ascendc/signal.h"
#include "op_kernels/common/ascendc/stored_rows.h"

namespace rec_sdk {
namespace ascendc {

// Divisors of the lookups of a tile, written by the scalar unit while the vector unit may still use those of
// the tiles before: a ring of them.
class Divisors {
 public:
  static constexpr int64_t kRing = 4;
  static constexpr uint32_t kBytesOfRow = kRing * sizeof(float);

  __aicore__ inline void init(TPipe* pipe, int64_t rows) {
    rows_ = rows;
    pipe->InitBuffer(buffer_, static_cast<uint32_t>(kRing * rows * sizeof(float)));
    for (int64_t i = 0; i < kRing; ++i) {
      written_[i].init(pipe);
      used_[i].init(pipe);
    }
  }

  __aicore__ inline void begin_tile(int64_t tile) {
    if (tile >= kRing) used_[tile % kRing].wait();
    divides_[tile % kRing] = false;
  }

  // Sets the rows [begin, end) of the tile; the rows before have theirs already.
  __aicore__ inline void set(int64_t tile, int64_t begin, int64_t end, bool divides, float divisor) {
    bool& tile_divides = divides_[tile % kRing];
    if (divides && !tile_divides) {
      tile_divides = true;
      fill(tile, 0, begin, 1.0f);
    }
    if (tile_divides) fill(tile, begin, end, divides ? divisor : 1.0f);
  }

  __aicore__ inline void apply(int64_t tile, const LocalTensor<float>& values, int64_t rows) {
    if (divides_[tile % kRing]) {
      written_[tile % kRing].order();
      vector_barrier();
      AscendC::Div(values, values, of(tile), static_cast<int32_t>(rows));
    }
    used_[tile % kRing].set();
  }

  __aicore__ inline void finish(int64_t tiles) {
    for (int64_t tile = maximum<int64_t>(0, tiles - kRing); tile < tiles; ++tile) {
      used_[tile % kRing].wait();
    }
  }

 private:
  __aicore__ inline LocalTensor<float> of(int64_t tile) {
    return buffer_.Get<float>()[static_cast<uint32_t>(tile % kRing * rows_)];
  }
  __aicore__ inline void fill(int64_t tile, int64_t begin, int64_t end, float value) {
    for (int64_t i = begin; i < end; ++i) of(tile).SetValue(static_cast<uint32_t>(i), value);
  }

  int64_t rows_ = 0;
  Landing buffer_;
  Signal<HardEvent::V_S> used_[kRing];
  Signal<HardEvent::S_V> written_[kRing];
  bool divides_[kRing] = {};
};

// The bags that the lookups of a tile belong to, and the runs of those whose gradients are `stride` values
// apart, which come together. Two tiles' worth, since one is loaded ahead.
class TileBags {
 public:
  static constexpr int64_t kTiles = 2;
  static constexpr uint32_t kBytesOfRow = kTiles * (2 * sizeof(int32_t) + sizeof(int64_t));

  __aicore__ inline void init(TPipe* pipe, int64_t rows, int64_t stride) {
    rows_ = rows;
    // Gradients too far apart for a copy have runs of their own: none begins where the one before does.
    to_next_ = stride * static_cast<int64_t>(sizeof(float)) <= kMaxGap ? stride : 0;
    pipe->InitBuffer(ends_, static_cast<uint32_t>(kTiles * rows * sizeof(int32_t)));
    pipe->InitBuffer(first_bags_, static_cast<uint32_t>(kTiles * rows * sizeof(int32_t)));
    pipe->InitBuffer(gradients_, static_cast<uint32_t>(kTiles * rows * sizeof(int64_t)));
  }

  // The bags of a tile while they are listed. The scalar unit bounds that loop.
  struct List {
    LocalTensor<int32_t> ends, first_bags;
    LocalTensor<int64_t> gradients;
    uint32_t bags, runs;
    int64_t next, to_next;

    // A bag: one past its last row of the tile, and where its gradient starts, in values.
    __aicore__ inline void append(int64_t end, int64_t gradient) {
      if (gradient != next) {
        first_bags.SetValue(runs, static_cast<int32_t>(bags));
        gradients.SetValue(runs++, gradient);
      }
      next = gradient + to_next;
      ends.SetValue(bags++, static_cast<int32_t>(end));
    }
  };
  __aicore__ inline List begin_tile(int64_t tile) {
    return {ends(tile), first_bags(tile), gradients(tile), 0, 0, -1, to_next_};
  }
  __aicore__ inline void end_tile(int64_t tile, const List& list) {
    bags_[tile % kTiles] = list.bags;
    runs_[tile % kTiles] = list.runs;
  }

  __aicore__ inline uint32_t count(int64_t tile) const { return bags_[tile % kTiles]; }
  // [count]: one past the last row of each bag of the tile.
  __aicore__ inline LocalTensor<int32_t> ends(int64_t tile) { return ends_.Get<int32_t>()[place(tile)]; }

  __aicore__ inline uint32_t runs(int64_t tile) const { return runs_[tile % kTiles]; }
  // [runs]: the first bag of each run, and where its gradient starts, in values.
  __aicore__ inline LocalTensor<int32_t> first_bags(int64_t tile) {
    return first_bags_.Get<int32_t>()[place(tile)];
  }
  __aicore__ inline LocalTensor<int64_t> gradients(int64_t tile) {
    return gradients_.Get<int64_t>()[place(tile)];
  }

 private:
  __aicore__ inline uint32_t place(int64_t tile) const {
    return static_cast<uint32_t>(tile % kTiles * rows_);
  }

  int64_t rows_ = 0, to_next_ = 0;
  uint32_t bags_[kTiles] = {}, runs_[kTiles] = {};
  Scratch ends_, first_bags_;
  Landing gradients_;
};

// A tile of lookups is loaded with one gradient row for each bag in it, panel by panel of columns, and leaves
// one value for each lookup.
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
  static constexpr int64_t kWidestPanel = 240, kSlots = 1024;    // columns, slots
  static constexpr int64_t kRowUnit = kUbBlock / sizeof(float);  // rows of a tile
  static constexpr bool kWidens = sizeof(Stored) != sizeof(float);
  static constexpr int64_t kBytesOfValue =
      2 * sizeof(Stored) + (kWidens ? 2 * sizeof(float) : 0) + 2 * sizeof(float);
  static constexpr int64_t kBytesOfRow =
      (LaneSums::floats_of_row(1) + 2) * sizeof(float) + Divisors::kBytesOfRow + TileBags::kBytesOfRow;
  static constexpr int64_t kOtherBytes =
      ScalarStream<int32_t, kSlots>::kBytes + BagWalk::kBytes + BagSearch::kBytes;
  static_assert(kRowUnit * ((kWidestPanel + kWidthMultiple) * kBytesOfValue + kBytesOfRow) + kOtherBytes <=
                    kUbBytes,
                "UB");

  struct Position {
    int64_t bag, lookup;  // the lookup is in the bag, or follows its last
  };

  // The core's lookups by the bytes they move. Bags may be cut.
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

  // As many lookups as fit. Where panels read their slots again, a power of two: then a tile never straddles
  // chunks of the stream of slots.
  __aicore__ inline void plan_tiles() {
    panels_ = ceil_div(a_.weights.dim, kWidestPanel);
    panel_ = align_up(ceil_div(a_.weights.dim, panels_), kWidthMultiple);
    pitch_ = spread_pitch(panel_, kUbBlock / sizeof(Stored));
    const int64_t fit = (kUbBytes - kOtherBytes) / (pitch_ * kBytesOfValue + kBytesOfRow);
    const int64_t rows = tile_rows(align_down(fit, kRowUnit), end_ - begin_);
    rows_ = panels_ > 1 ? int64_t{1} << floor_log2(rows) : rows;
    rows_ = maximum(kRowUnit, align_down(rows_, kRowUnit));
    tiles_ = ceil_div(end_ - begin_, rows_);
  }

  __aicore__ inline void init_buffers(TPipe* pipe) {
    const int64_t values = rows_ * pitch_;
    pipe->InitBuffer(stored_, 2, static_cast<uint32_t>(values * sizeof(Stored)));
    pipe->InitBuffer(gradients_, 2, static_cast<uint32_t>(values * sizeof(float)));
    if (kWidens) {
      pipe->InitBuffer(widened_, static_cast<uint32_t>(rows_ * panel_ * sizeof(float)));
      pipe->InitBuffer(products_, static_cast<uint32_t>(values * sizeof(float)));
    }
    pipe->InitBuffer(results_, 2, static_cast<uint32_t>(rows_ * sizeof(float)));
    slots_.init(pipe);
    lanes_.init(pipe, rows_, pitch_);
    divisors_.init(pipe, rows_);
    bags_.init(pipe, rows_, a_.grad_stride);
  }

  __aicore__ inline void compute() {
    const int64_t steps = tiles_ * panels_;
    load_step(0);
    for (int64_t step = 0; step < steps; ++step) {
      if (step + 1 < steps) load_step(step + 1);
      const int64_t tile = step / panels_, panel = step % panels_;
      if (panel == 0) lanes_.begin(rows_in(tile));
      add_products(tile, panel);
      if (panel + 1 == panels_) store_tile(tile);
    }
  }

  __aicore__ inline int64_t first_of(int64_t tile) const { return begin_ + tile * rows_; }
  __aicore__ inline int64_t rows_in(int64_t tile) const { return minimum(rows_, end_ - first_of(tile)); }
  __aicore__ inline int64_t width_of(int64_t panel) const {
    return minimum(panel_, a_.weights.dim - panel * panel_);
  }

  __aicore__ inline void load_step(int64_t step) {
    const int64_t tile = step / panels_, panel = step % panels_;
    if (panel == 0) list_bags(tile);
    const int64_t column = panel * panel_, width = width_of(panel);
    LocalTensor<Stored> rows = stored_.template AllocTensor<Stored>();
    load_rows_of_weights(rows, row_pitch(width), a_.weights, &slots_, first_of(tile), rows_in(tile), column,
                         width);
    stored_.EnQue(rows);
    LocalTensor<float> gradients = gradients_.template AllocTensor<float>();
    load_gradients(tile, gradients, column, width);
    gradients_.EnQue(gradients);
  }

  __aicore__ inline void load_gradients(int64_t tile, const LocalTensor<float>& to, int64_t column,
                                        int64_t width) {
    const LocalTensor<int32_t> first_bags = bags_.first_bags(tile);
    const LocalTensor<int64_t> gradients = bags_.gradients(tile);
    const uint32_t runs = bags_.runs(tile);
    int64_t first = 0;
    for (uint32_t run = 0; run < runs; ++run) {
      const int64_t end = run + 1 < runs ? first_bags.GetValue(run + 1) : bags_.count(tile);
      load_rows(to[static_cast<uint32_t>(first * pitch_)], a_.grad + gradients.GetValue(run) + column,
                end - first, width, a_.grad_stride, pitch_);
      first = end;
    }
  }

  // The pitch of rows as they come: no gap between those that one instruction widens.
  __aicore__ inline int64_t row_pitch(int64_t width) const {
    return kWidens ? align_up(width, kWidthMultiple) : pitch_;
  }

  __aicore__ inline void list_bags(int64_t tile) {
    const int64_t rows = rows_in(tile);
    TileBags::List list = bags_.begin_tile(tile);
    divisors_.begin_tile(tile);
    for (int64_t row = 0; row < rows;) row = list_run(tile, row, rows, &list);
    bags_.end_tile(tile, list);
  }

  // The bags from the one where walk_ stands on that lie side by side in its stream, up to the end of the
  // tile's `rows`; returns how many rows have their bags now. Bags without lookups are none.
  __aicore__ inline int64_t list_run(int64_t tile, int64_t row, int64_t rows, TileBags::List* list_of_tile) {
    const int64_t first = first_of(tile), stride = a_.grad_stride;
    const bool mean = walk_.mean();
    if (!mean)
      divisors_.set(tile, row, rows, false, 1.0f);  // of the rows that follow in this feature, at least
    TileBags::List list = *list_of_tile;
    int64_t gradient = walk_.sample() * stride + walk_.column(), begin = walk_.first() - first, end = begin;
    const auto ends = walk_.ends();
    uint32_t ended = 0;
    for (const auto bags = static_cast<uint32_t>(ends.count); ended < bags; ++ended, gradient += stride) {
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

  __aicore__ inline void add_products(int64_t tile, int64_t panel) {
    const auto width = static_cast<int32_t>(width_of(panel));
    LocalTensor<Stored> stored = stored_.template DeQue<Stored>();
    LocalTensor<float> gradients = gradients_.template DeQue<float>();
    const LocalTensor<float> rows = as_floats(stored, rows_in(tile), width);
    const LocalTensor<float> products = kWidens ? products_.template Get<float>() : rows;
    multiply(tile, products, rows, gradients, width);
    vector_barrier();
    lanes_.add(products, width);
    gradients_.FreeTensor(gradients);
    stored_.FreeTensor(stored);
  }

  // Each row of the tile by the gradient of its bag: the rows of a long bag together, 64 columns of each.
  __aicore__ inline void multiply(int64_t tile, LocalTensor<float> products, LocalTensor<float> rows,
                                  LocalTensor<float> gradients, int64_t width) {
    constexpr auto kRepeat = static_cast<uint32_t>(OneMask::kRepeat);
    const auto columns = static_cast<uint32_t>(width), pitch = static_cast<uint32_t>(pitch_),
               row_pitch = static_cast<uint32_t>(this->row_pitch(width));
    const uint32_t long_bag = columns % kRepeat == 0 ? columns / kRepeat + 2 : UINT32_MAX;  // 2: of masks
    const LocalTensor<int32_t> ends = bags_.ends(tile);
    uint32_t begin = 0;
    OneMask::begin(width);
    for (uint32_t i = 0, bags = bags_.count(tile); i < bags; ++i) {
      const uint32_t end = static_cast<uint32_t>(ends.GetValue(i)), count = end - begin;
      if (count >= long_bag) {
        multiply_columns(products, rows, gradients, count, {columns, pitch, row_pitch});
      } else {
        multiply_rows(products, rows, gradients, count, {columns, pitch, row_pitch});
      }
      products = products[count * pitch];
      rows = rows[count * row_pitch];
      gradients = gradients[pitch];
      begin = end;
    }
    OneMask::end();
  }

  // Values from a row to the next: of products, and of the rows that are multiplied.
  struct TileShape {
    uint32_t columns, pitch, row_pitch;
  };
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

  __aicore__ inline void store_tile(int64_t tile) {
    const int64_t rows = rows_in(tile);
    LocalTensor<float> results = results_.template AllocTensor<float>();
    lanes_.finish(results);
    divisors_.apply(tile, results, rows);
    results_.EnQue(results);
    LocalTensor<float> stored = results_.template DeQue<float>();
    store(a_.out + first_of(tile), stored, rows);
    results_.FreeTensor(stored);
  }

  PooledWeightsGrad a_{};
  int64_t begin_ = 0, end_ = 0;
  int64_t panel_ = 0, panels_ = 0, pitch_ = 0, rows_ = 0, tiles_ = 0;
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
