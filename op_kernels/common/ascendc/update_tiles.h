// The update of rows, tile by tile: records and gradients are loaded to UB, the optimizer runs on all rows of
// the tile at once, and the records are stored.
#pragma once

#include "op_kernels/common/ascendc/plane_count.h"
#include "op_kernels/common/ascendc/record_tile.h"
#include "op_kernels/common/ascendc/row_norms.h"
#include "op_kernels/common/ascendc/row_split.h"
#include "op_kernels/common/ascendc/row_values.h"
#include "op_kernels/common/ascendc/rows_to_update.h"
#include "op_kernels/common/ascendc/stochastic_rounding.h"
#include "op_kernels/common/ascendc/tile_rows.h"
#include "op_kernels/common/optimizers.h"

namespace rec_sdk {
namespace ascendc {

// Updates the rows of one core. Optimizer: a struct of optimizers.h. Weights: a type of record_tile.h. The
// lists of a tile's rows take about 8 KB of the scalar unit's stack, which has 32 KB on 2201 and 3510 in
// CANN's own build.
template <class Optimizer, class Weights>
class UpdateTiles {
 public:
  __aicore__ inline void run(TPipe* pipe, const RowsToUpdate& a) {
    a_ = a;
    RowSplit split;
    split.init(pipe, a.segments, a.workspace, a.shape.bytes);
    rows_ = split.rows_of_core();
    if (rows_.begin == rows_.end) return;
    init(pipe);
    Step step = first_step();
    load(step);
    while (step.row < rows_.end) {
      const Step next = step_after(step);
      arrived_[step.set].wait();
      sum_gradients(step);
      if (next.row < rows_.end) load(next);
      compute(step);
      computed_[step.set].order();
      if (step.update()) store(step);
      free_[step.set].set();
      step = next;
    }
    finish();
  }

 private:
  static constexpr int kElementStates = Optimizer::kElementStates, kRowStates = Optimizer::kRowStates;
  static constexpr int kFormulaPlanes = planes_of_formula<Optimizer>();
  static constexpr int kPasses = Optimizer::kMeasures;  // the passes before the update
  static_assert(kRowStates == 0 || kPasses > 0, "begin_row changes row states");
  static_assert(kPasses < 2 || Optimizer::kMeasuresRecord, "row states come with the record");

  using RowNumbers = RowValues<kPasses, Optimizer::kSums, Optimizer::kValues>;
  enum RowArray { kOffset, kSlot, kRowArrays };
  // Slots are read when a tile is loaded, and again after the next tile was loaded.
  using RowIndex = IndexWindows<kRowArrays, 4 * kMaxTileRows>;
  using RowRun = typename RecordTiles<Weights>::Rows;

  // The maximum UB that is used in addition to a tile, and the largest record.
  static constexpr BesideTile kMostBeside{
      maximum(maximum(1, kFormulaPlanes), StochasticRounding::kPlanes), StochasticRounding::kShared,
      kRowArrays * RowIndex::kBytesOfArray + kLookupArrays * LookupIndex::kBytesOfArray + RowSplit::kBytes,
      RowNorms::kFloatsOfRow};
  static constexpr RecordShape kLargest{kLanes, 0, 4, kElementStates, kRowStates, 0, 0, true};
  static_assert(narrowest_tile_bytes(kLargest, RowNumbers::kNeeds, kMostBeside, INT32_MAX) <= kUbBytes,
                "the narrowest tile fits UB, whatever the width of the rows");

  // One pass over columns of a tile of rows of one table. If rows are wider than a tile, an optimizer that
  // measures them processes all columns in each of its passes, and then updates them.
  struct Step {
    int64_t row, rows, table, table_end;
    TileColumns columns;
    int pass;
    int set;

    __aicore__ inline bool update() const { return pass == kPasses; }
    __aicore__ inline bool has_record() const { return update() || Optimizer::kMeasuresRecord; }
  };

  // Returns the terms of the rows that GradientSums sums.
  struct TileTerms {
    const UpdateTiles& tiles;
    const Step& step;
    __aicore__ inline Terms operator()(int64_t i) const {
      return tiles.terms_of(step, tiles.tile_rows_[step.set].summed.rows[i]);
    }
  };

  __aicore__ inline void init(TPipe* pipe) {
    const Lookups& lookups = a_.segments.lookups;
    row_index_.init(pipe);
    row_index_.add(pipe, kOffset, a_.segments.offsets, rows_.end + 1);
    row_index_.add(pipe, kSlot, a_.segments.unique_slots, rows_.end);
    const int64_t end =
        global(a_.segments.offsets, a_.segments.rows + 1).GetValue(static_cast<uint64_t>(rows_.end));
    open_lookup_index(&lookup_index_, pipe, lookups, end);
    BesideTile beside{maximum(1, kFormulaPlanes), 0,
                      kRowArrays * RowIndex::kBytesOfArray + lookup_index_bytes(lookups) + RowSplit::kBytes};
    if (stochastic()) {
      beside.planes = maximum(beside.planes, StochasticRounding::kPlanes);
      beside.shared = StochasticRounding::kShared;
    }
    if (counts()) beside.row_floats = RowNorms::kFloatsOfRow;
    plan_ = plan_tiles(a_.shape, RowNumbers::kNeeds, beside, lookups.count, rows_.end - rows_.begin);
    sums_.init(pipe, &lookup_index_, lookups, plan_.pitch, plan_.levels, a_.workspace.sums,
               a_.workspace.pitch);
    records_.init(pipe, a_.shape, plan_, a_.records);
    pool_.init(pipe, plan_.rows * plan_.pitch, beside.planes);
    if (kPasses > 0) row_values_.init(pipe, plan_, a_.shape);
    if (counts()) norms_.init(pipe, plan_, a_.norms, a_.segments.rows);
    if (stochastic()) rounding_.init(pipe, plan_.pitch);
    vector_barrier();
    for (int s = 0; s < 2; ++s) {
      arrived_[s].init(pipe);
      computed_[s].init(pipe);
      free_[s].init(pipe);
      free_[s].set();
    }
    cleared_.init(pipe);
    cleared_.order();
  }

  __aicore__ inline void finish() {
    for (int s = 0; s < 2; ++s) free_[s].wait();
    sums_.finish();
    records_.finish();
    row_index_.finish();
    lookup_index_.finish();
  }

  __aicore__ inline Step first_step() const {
    Step step{rows_.begin, 0, 0, 0, {0, minimum(plan_.width, a_.shape.dim)}, first_pass(), 0};
    find_table(&step);
    return step;
  }

  __aicore__ inline Step step_after(const Step& step) const {
    Step next = step;
    next.set = 1 - step.set;
    next.columns.column += plan_.width;
    if (next.columns.column >= a_.shape.dim) {
      next.columns.column = 0;
      next.pass = step.update() ? first_pass() : step.pass + 1;
      if (step.update()) {
        next.row += step.rows;
        if (next.row < rows_.end) find_table(&next);
      }
    }
    next.columns.width = minimum(plan_.width, a_.shape.dim - next.columns.column);
    return next;
  }

  // Rows that fit into a tile are measured and updated at once.
  __aicore__ inline bool whole_rows() const { return plan_.width >= a_.shape.dim; }
  __aicore__ inline int first_pass() const { return whole_rows() ? kPasses : 0; }

  // Finds the table of step->row, and limits the rows to its end.
  __aicore__ inline void find_table(Step* step) const {
    const TablesOfRows& tables = a_.tables;
    if (tables.offsets == nullptr) {
      step->table_end = a_.segments.rows;
    } else {
      const GlobalTensor<int32_t> offsets = global(tables.offsets, tables.count + 1);
      while (step->row >= step->table_end) {
        step->table_end = offsets.GetValue(static_cast<uint64_t>(step->table + 1));
        if (step->row >= step->table_end) ++step->table;
      }
    }
    step->rows = minimum(plan_.rows, minimum(step->table_end, rows_.end) - step->row);
  }

  __aicore__ inline bool counts() const { return a_.norms != nullptr; }
  __aicore__ inline bool stochastic() const { return Weights::kRounds && a_.rounding.ids != nullptr; }

  __aicore__ inline void load_numbers(const Step& step) {
    const int64_t seed =
        global(a_.rounding.seeds, a_.tables.count).GetValue(static_cast<uint64_t>(step.table));
    const GlobalTensor<int64_t> ids = global(a_.rounding.ids, a_.segments.rows);
    for (int64_t r = 0; r < step.rows; ++r) {
      const int64_t id = ids.GetValue(static_cast<uint64_t>(step.row + r));
      tile_rows_[step.set].numbers[r] = REC_SDK_ISA::row_numbers(id, seed);
    }
  }

  __aicore__ inline Terms terms_of(const Step& step, int64_t r) const {
    const int64_t begin = row_index_.at(kOffset, step.row + r);
    const int64_t lookups = row_index_.at(kOffset, step.row + r + 1) - begin;
    const int64_t chunks = chunks_of(lookups, a_.workspace);
    return {r, first_place(begin), chunks, begin + chunks * kChunk, lookups - chunks * kChunk};
  }

  // Loads the records, and the gradients of rows with few lookups.
  __aicore__ inline void load(const Step& step) {
    free_[step.set].wait();
    row_index_.reach(step.row, step.row + step.rows);
    if (step.has_record()) {
      RowRun run{step.set, 0, 0, {}};
      while (next_run(step, &run)) records_.load_records(run, step.columns);
    }
    if (sums_.plain(step.columns)) {
      load_gradients<true>(step);
    } else {
      load_gradients<false>(step);
    }
    arrived_[step.set].set();
    if (stochastic() && step.update()) load_numbers(step);
  }

  // Advances `run` to the next rows of the step; returns false at the end.
  __aicore__ inline bool next_run(const Step& step, RowRun* run) const {
    run->first += run->count;
    if (run->first == step.rows) return false;
    const auto slots = row_index_.run(kSlot, step.row + run->first, step.rows - run->first);
    run->count = slots.count;
    run->slots = slots.values;
    return true;
  }

  // Loads the gradients of rows with few lookups. The first gradient of a row is loaded directly to its
  // position, additional gradients to a buffer. A first loop handles rows with one or two lookups, a second
  // loop rows with few lookups. Both loops have little code, because the scalar unit limits their speed.
  // kPlain means that plain() is true.
  template <bool kPlain>
  __aicore__ inline void load_gradients(const Step& step) {
    TileRows& rows = tile_rows_[step.set];
    rows.summed.count = rows.empty.count = 0;
    others_.clear();
    ExtraCursor further{sums_.open(step.set), 0, 0, rows.further};
    // Scaled gradients are summed separately.
    if (reads_alone<kPlain>()) further.left = static_cast<uint32_t>(sums_.capacity());
    int32_t begin = row_index_.at(kOffset, step.row);
    const int64_t all_reached = reads_alone<kPlain>() ? reach_lookups(begin, step) : 0;
    for (int64_t first = 0; first < step.rows;) {
      // Indices of scaled gradients are not fetched here, because the sums read them later, and the window
      // would have to move back.
      int64_t reached = all_reached - begin;
      if (all_reached == 0) reached = reads_alone<kPlain>() ? lookup_index_.reached(begin) - begin : 0;
      const auto ends = row_index_.run(kOffset, step.row + first + 1, step.rows - first);
      const auto lookups = lookup_index_.run(kGradRow, begin, reached);
      first += load_alone<kPlain>(step, first, ends, lookups, &begin, &further);
    }
    if (others_.end != others_.rows) load_few<kPlain>(step, all_reached, &further);
    rows.few = further.sums - rows.further;
  }

  // Fetches the indices of the step's lookups to UB if they are few enough to fit at once, so that its rows
  // form one run; returns their end, else 0.
  __aicore__ inline int64_t reach_lookups(int64_t begin, const Step& step) {
    const int64_t end = row_index_.at(kOffset, step.row + step.rows);
    if (end == begin || !LookupIndex::fit(begin, end - 1)) return 0;
    lookup_index_.reach(begin, end - 1);
    return end;
  }

  // Returns whether a gradient can be loaded to its final position: scaled gradients are summed separately.
  template <bool kPlain>
  __aicore__ inline bool reads_alone() const {
    return kPlain || !sums_.scaled();
  }

  // Loads gradients of the rows from r on whose ends are in `ends` and within `reached`, but of at least one
  // row. Their lookups start at `begin`. Returns the number of rows, and sets `begin` to the start of the
  // next row.
  template <bool kPlain>
  __aicore__ inline int64_t load_alone(const Step& step, int64_t r, const typename RowIndex::Run& ends,
                                       const LookupIndex::Run& reached, int32_t* begin,
                                       ExtraCursor* further_of_tile) {
    const int32_t first = *begin;
    const int64_t last = reads_alone<kPlain>() ? first + reached.count : INT64_MAX;
    auto count = static_cast<uint32_t>(ends.count);
    while (count > 1 && ends.values.GetValue(count - 1) > last) count /= 2;
    const GradientSums::RunOfGradients<kPlain> gradients{
        sums_.template gradients<kPlain>(step.columns.column), reached, first};
    const int64_t width = step.columns.width;
    // This loop loads rows of one lookup unless they are summed separately, and rows of two lookups if the
    // lookups are in UB.
    const int32_t alone = reads_alone<kPlain>() ? 1 : -1;
    const int32_t pair = ends.values.GetValue(count - 1) <= last ? 2 * alone : -1;
    const auto pitch = static_cast<uint32_t>(plan_.pitch);
    const LocalTensor<float> to = records_.gradients(step.set);
    ExtraCursor further = *further_of_tile;
    uint32_t place = static_cast<uint32_t>(r) * pitch;
    int32_t at = first;
    for (uint32_t i = 0; i < count; ++i, place += pitch) {
      const int32_t end = ends.values.GetValue(i), lookups = end - at;
      if (lookups == alone) {
        sums_.template load_gradient<kPlain>(to[place], gradients(at), width);
      } else if (lookups == pair && further.left > 0) {
        sums_.template load_gradient<kPlain>(to[place], gradients(at), width);
        sums_.template load_gradient<kPlain>(further.terms[further.place], gradients(at + 1), width);
        further.place += pitch;
        --further.left;
        *further.sums++ = {place, further.place};
      } else {
        others_.add(place, at, end);
      }
      at = end;
    }
    *begin = at;
    *further_of_tile = further;
    return count;
  }

  // Loads the gradients of the other rows that have few lookups. The indices of lookups before `reached` are
  // in UB.
  template <bool kPlain>
  __aicore__ inline void load_few(const Step& step, int64_t reached, ExtraCursor* further_of_tile) {
    const auto gradients = sums_.template gradients<kPlain>(step.columns.column);
    const auto pitch = static_cast<uint32_t>(plan_.pitch);
    const int64_t width = step.columns.width;
    const LocalTensor<float> to = records_.gradients(step.set);
    ExtraCursor further = *further_of_tile;
    for (const RowLookups* row = others_.rows; row != others_.end; ++row) {
      const auto after_second = static_cast<uint32_t>(row->end - row->begin - 2);
      if (after_second >= minimum<uint32_t>(further.left, kSumBlock - 1)) {
        defer_sum(step, *row);
        continue;
      }
      further.left -= after_second + 1;
      int32_t lookup = row->begin;
      if (row->end > reached) {
        lookup_index_.reach(lookup, row->end - 1);
        reached = lookup_index_.reached(row->end - 1);
      }
      sums_.template load_gradient<kPlain>(to[row->place], gradients(lookup), width);
      while (++lookup < row->end) {
        sums_.template load_gradient<kPlain>(further.terms[further.place], gradients(lookup), width);
        further.place += pitch;
      }
      *further.sums++ = {row->place, further.place};
    }
    *further_of_tile = further;
  }

  // Adds a row to the list of rows without a gradient, or to the list of rows that are summed separately.
  __aicore__ inline void defer_sum(const Step& step, const RowLookups& row) {
    TileRows& rows = tile_rows_[step.set];
    const int64_t r = row.place / plan_.pitch;
    if (row.begin == row.end) {
      rows.empty.add(r);
    } else {
      rows.summed.add(r);
    }
  }

  __aicore__ inline void sum_gradients(const Step& step) {
    const TileRows& rows = tile_rows_[step.set];
    const LocalTensor<float> gradients = records_.gradients(step.set);
    for (int64_t i = 0; i < rows.empty.count; ++i) {
      AscendC::Duplicate(gradients[static_cast<uint32_t>(rows.empty.rows[i] * plan_.pitch)], 0.0f,
                         static_cast<int32_t>(step.columns.width));
    }
    sums_.add_extra(step.set, rows.further, rows.few, step.columns.width, gradients);
    sums_.run(TileTerms{*this, step}, rows.summed.count, step.columns.column, step.columns.width, gradients);
    vector_barrier();
  }

  __aicore__ inline void compute(const Step& step) {
    read_coefficients(step.table);
    const Optimizer optimizer(coefficients_);
    const auto count = static_cast<int32_t>(step.rows * plan_.pitch);
    Elements e{Plane(&pool_, records_.gradients(step.set), count), {}, {}};
    if (counts() && step.update()) norms_.count(e.g, step.rows, step.columns, a_.shape.dim, step.set);
    clip_gradients(e.g, coefficients_[0]);
    if (step.has_record()) {
      records_.decode(step.set, step.rows, step.columns);
      e.w.view(&pool_, records_.weights(step.set), count);
      for (int s = 0; s < kElementStates; ++s) {
        e.states[s].view(&pool_, records_.element_state(step.set, s), count);
      }
      optimizer.advance(e.states, e.g);
    }
    go_through<0>(optimizer, &e, step, NoValues{});
    if (!step.update()) return;
    if (stochastic()) {
      rounding_.template run<Weights::kHalf>(records_.weights(step.set), &pool_, tile_rows_[step.set].numbers,
                                             step.rows, step.columns.column);
    }
    records_.encode(step.set, step.rows, step.columns);
    if (kRowStates > 0) records_.join_row_state(step.set, step.rows);
  }

  // The planes of a tile: gradient, weight and new states.
  struct Elements {
    Plane g, w, states[kElementStates + 1];
  };
  using NoValues = REC_SDK_ISA::NoValues;

  // Runs the passes of a step from kPass on; `values` are the previous pass's values, as row planes.
  template <int kPass, class Values>
  __aicore__ inline void go_through(const Optimizer& optimizer, Elements* e, const Step& step,
                                    const Values& values) {
    if constexpr (kPass == kPasses) {
      optimizer.element(e->w, e->states, e->g, of_columns(*e, step, values));
    } else {
      constexpr REC_SDK_ISA::Pass<kPass> kThis{};
      using Terms = decltype(optimizer.measure(kThis, e->w, e->states, e->g, values));
      if (whole_rows() || step.pass == kPass) {
        row_values_.add(optimizer.measure(kThis, e->w, e->states, e->g, of_columns(*e, step, values)),
                        step.rows, step.columns);
        if (step.columns.column + step.columns.width < a_.shape.dim) return;
        row_values_.template finish<Terms::kCount>(kPass);
        if (!whole_rows()) return;
      }
      using Next = decltype(optimizer.begin_row(kThis, e->states, Terms{}, 0.0f, values));
      if (step.columns.column == 0) begin_rows<Terms::kCount>(kThis, optimizer, step, values);
      go_through<kPass + 1>(optimizer, e, step, row_values_.template values<Next::kCount>(&pool_, step.rows));
    }
  }

  __aicore__ inline NoValues of_columns(const Elements&, const Step&, NoValues) { return {}; }
  template <int kCount>
  __aicore__ inline Numbers<Plane, kCount> of_columns(const Elements& e, const Step& step,
                                                      const Numbers<Plane, kCount>&) {
    return row_values_.template broadcast<kCount>(e.g, step.rows);
  }

  // Updates the row states, and keeps the values. Each sweep over the columns that includes the record loads
  // the row states again, so it repeats begin_row of all previous passes.
  template <int kSums, class Pass, class Values>
  __aicore__ inline void begin_rows(Pass pass, const Optimizer& optimizer, const Step& step,
                                    const Values& values) {
    Plane states[kRowStates + 1];
    for (int s = 0; s < kRowStates; ++s) {
      // A state that is copied together with the weights is stored after all passes.
      const bool taken = plan_.joined && pass.kNumber > 0;
      const LocalTensor<float> state =
          taken ? row_values_.state(s)
                : row_values_.take_state(s, records_.loaded_row_state(step.set, s), step.rows);
      states[s].view(&pool_, state, static_cast<int32_t>(step.rows));
    }
    const Numbers<Plane, kSums> sums = row_values_.template sums<kSums>(&pool_, pass.kNumber, step.rows);
    row_values_.keep(optimizer.begin_row(pass, states, sums, static_cast<float>(a_.shape.dim), values),
                     step.rows);
    for (int s = 0; s < kRowStates; ++s) row_values_.put_state(s, records_.row_state(step.set, s), step.rows);
  }

  __aicore__ inline void read_coefficients(int64_t table) {
    if (table == coefficients_of_) return;
    coefficients_of_ = table;
    coefficients_[0] = __builtin_inff();
    if (a_.tables.coefficients == nullptr) return;
    const GlobalTensor<float> all = global(a_.tables.coefficients, a_.tables.count * kCoefficients);
    for (int64_t i = 0; i < kCoefficients; ++i) {
      coefficients_[i] = all.GetValue(static_cast<uint64_t>(table * kCoefficients + i));
    }
  }

  // Implements clip() of optimizers.h.
  __aicore__ inline void clip_gradients(const Plane& g, float max_gradient) const {
    if (!(max_gradient < __builtin_inff())) return;
    const PlaneStorage& at = g.storage();
    AscendC::Mins(at.data, at.data, max_gradient, at.count);
    vector_barrier();
    AscendC::Maxs(at.data, at.data, -max_gradient, at.count);
    vector_barrier();
  }

  __aicore__ inline void store(const Step& step) {
    RowRun run{step.set, 0, 0, {}};
    while (next_run(step, &run)) records_.store_records(run, step.columns);
    if (counts() && step.columns.column + step.columns.width == a_.shape.dim) {
      norms_.store_rows(step.set, step.row, step.rows);
    }
  }

  RowsToUpdate a_;
  Share rows_;
  TilePlan plan_;
  RowIndex row_index_;
  LookupIndex lookup_index_;
  GradientSums sums_;
  RecordTiles<Weights> records_;
  PlanePool pool_;
  RowNumbers row_values_;
  RowNorms norms_;
  StochasticRounding rounding_;
  TileRows tile_rows_[2];
  LookedUpRows others_;  // used while a tile is loaded: rows that are not exactly one gradient
  float coefficients_[kCoefficients];
  int64_t coefficients_of_ = -1;  // index of a table
  Signal<HardEvent::MTE2_V> arrived_[2];
  Signal<HardEvent::V_MTE3> computed_[2];
  Signal<HardEvent::MTE3_MTE2> free_[2];
  Signal<HardEvent::V_MTE2> cleared_;
};

}  // namespace ascendc
}  // namespace rec_sdk
