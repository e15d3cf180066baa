// The update of rows: a team sums the gradients of a row and applies the optimizer to the row's record.
#pragma once

#include "op_kernels/common/cuda/gradient_table.h"
#include "op_kernels/common/cuda/hot_rows.h"
#include "op_kernels/common/cuda/lane_sum.h"
#include "op_kernels/common/cuda/row_norms.h"
#include "op_kernels/common/optimizers.h"
#include "op_kernels/common/rounding.h"

namespace rec_sdk {
namespace cuda {

// The rounding of a row's weights: either stochastic, with the row's random numbers, or to nearest.
struct Rounding {
  bool stochastic;
  REC_SDK_ISA::RowNumbers numbers;

  // Rounds weights to values that Format can store exactly.
  template <class Format, int N>
  __device__ __forceinline__ Columns<N> rounded(Columns<N> weights, int column) const {
    if constexpr (Format::kRounds) {
      for (int k = 0; stochastic && k < N; ++k) {
        const uint32_t random = numbers.at(static_cast<uint32_t>(column + k));
        weights[k] = Format::load(Format::store(weights[k], random));
      }
    }
    return weights;
  }
};

// Loads and stores states that are all float32.
struct PlainStates {
  template <int N>
  static __device__ __forceinline__ Columns<N> load(const RecordLayout&, int, const uint8_t* block,
                                                    int column) {
    return cuda::load<Float32, N>(reinterpret_cast<const float*>(block) + column).unpack();
  }
  template <int N>
  static __device__ __forceinline__ void store(const RecordLayout&, int, uint8_t* block, int column,
                                               const Columns<N>& values) {
    cuda::store<Float32>(reinterpret_cast<float*>(block) + column, values);
  }
};

// Loads and stores states that each have their own dtype; stored values are rounded to nearest.
struct NarrowStates {
  using Float16 = REC_SDK_ISA::Float16;
  using BFloat16 = REC_SDK_ISA::BFloat16;

  template <int N>
  static __device__ __forceinline__ Columns<N> load(const RecordLayout& layout, int s, const uint8_t* block,
                                                    int column) {
    if (layout.state_dtype[s] == DType::kFloat32) return PlainStates::load<N>(layout, s, block, column);
    const uint16_t* from = reinterpret_cast<const uint16_t*>(block) + column;
    return layout.state_dtype[s] == DType::kFloat16 ? cuda::load<Float16, N>(from).unpack()
                                                    : cuda::load<BFloat16, N>(from).unpack();
  }
  template <int N>
  static __device__ __forceinline__ void store(const RecordLayout& layout, int s, uint8_t* block, int column,
                                               const Columns<N>& values) {
    if (layout.state_dtype[s] == DType::kFloat32) {
      PlainStates::store<N>(layout, s, block, column, values);
      return;
    }
    uint16_t* to = reinterpret_cast<uint16_t*>(block) + column;
    if (layout.state_dtype[s] == DType::kFloat16) {
      cuda::store<Float16>(to, values);
    } else {
      cuda::store<BFloat16>(to, values);
    }
  }
};

// A thread's columns of a record, in registers.
template <class Optimizer, class Format, class States, int N>
class RecordColumns {
 public:
  __device__ __forceinline__ RecordColumns(const RecordLayout& layout, uint8_t* record)
      : layout_(layout), record_(record) {}

  __device__ __forceinline__ void load_from(int column) {
    weights_ = load<Format, N>(weights(column)).unpack();
    for (int s = 0; s < kStates; ++s) states_[s] = States::template load<N>(layout_, s, state(s), column);
  }
  template <class Values>
  __device__ __forceinline__ void update(const Optimizer& optimizer, const Columns<N>& g,
                                         const Values& values) {
    for (int k = 0; k < N; ++k) {
      Element e(*this, optimizer, g, k);
      optimizer.element(weights_[k], e.states, g[k], values);
      for (int s = 0; s < kStates; ++s) states_[s][k] = e.states[s];
    }
  }
  // Returns the terms of a pass, or zeros if the columns are not in the row (`active` is false).
  template <class Pass, class Values>
  __device__ __forceinline__ auto measure(Pass pass, const Optimizer& optimizer, const Columns<N>& g,
                                          const Values& values, bool active) const {
    using Terms = decltype(optimizer.measure(pass, 0.0f, static_cast<float*>(nullptr), 0.0f, values));
    Numbers<Columns<N>, Terms::kCount> terms;
    for (int k = 0; k < N; ++k) {
      const Element e(*this, optimizer, g, k);
      const Terms of_column = optimizer.measure(pass, weights_[k], e.states, g[k], values);
      for (int i = 0; i < Terms::kCount; ++i) terms.each[i][k] = active ? of_column.each[i] : 0.0f;
    }
    return terms;
  }
  __device__ __forceinline__ void store_to(int column, const Rounding& rounding) const {
    store<Format>(weights(column), rounding.rounded<Format>(weights_, column));
    for (int s = 0; s < kStates; ++s) States::template store<N>(layout_, s, state(s), column, states_[s]);
  }

 private:
  static constexpr int kStates = Optimizer::kElementStates;

  // The states of column k after the update.
  struct Element {
    float states[kStates + 1];

    __device__ __forceinline__ Element(const RecordColumns& columns, const Optimizer& optimizer,
                                       const Columns<N>& g, int k) {
      for (int s = 0; s < kStates; ++s) states[s] = columns.states_[s][k];
      optimizer.advance(states, g[k]);
    }
  };

  __device__ __forceinline__ typename Format::Storage* weights(int column) const {
    return reinterpret_cast<typename Format::Storage*>(record_) + column;
  }
  __device__ __forceinline__ uint8_t* state(int s) const { return record_ + layout_.state_offset[s]; }

  const RecordLayout& layout_;
  uint8_t* record_;
  Columns<N> weights_{}, states_[kStates + 1]{};
};

// The row states of a record: states with one number for the whole row.
template <class Optimizer, class States>
class RowStates {
 public:
  __device__ __forceinline__ RowStates(const RecordLayout& layout, uint8_t* record)
      : layout_(layout), record_(record) {
    for (int s = 0; s < kStates; ++s)
      values_[s] = States::template load<1>(layout_, place(s), state(s), 0)[0];
  }

  // All threads of the team compute the same row states, and one thread stores them.
  __device__ __forceinline__ float* values() { return values_; }
  __device__ __forceinline__ void store(const Team& team) const {
    if (kStates == 0) return;
    __syncwarp(team.mask);  // every thread must have read the states before they are overwritten
    for (int s = 0; s < kStates; ++s) {
      if (team.lane == 0) States::template store<1>(layout_, place(s), state(s), 0, Columns<1>{{values_[s]}});
    }
  }

 private:
  static constexpr int kStates = Optimizer::kRowStates;

  static __device__ __forceinline__ int place(int s) { return Optimizer::kElementStates + s; }
  __device__ __forceinline__ uint8_t* state(int s) const { return record_ + layout_.state_offset[place(s)]; }

  const RecordLayout& layout_;
  uint8_t* record_;
  float values_[kStates + 1];
};

// Returns the table of unique row u.
__device__ __forceinline__ int table_of(const UpdateRows& a, int u) {
  const int32_t* offsets = a.table_offsets;
  return last_at_most([offsets](int i) { return offsets[i]; }, a.tables, u);
}

// Returns the coefficients of the table of row u. Null means that the gradient is not clipped and the
// optimizer has no coefficients.
__device__ __forceinline__ const float* coefficients_of(const UpdateRows& a, int u) {
  if (a.coefficients == nullptr) return nullptr;
  return a.coefficients + table_of(a, u) * kCoefficients;
}

__device__ __forceinline__ Rounding rounding_of(const UpdateRows& a, int u) {
  if (a.row_ids == nullptr) return {false, {}};
  const int64_t seed = a.rounding_seeds[table_of(a, u)];
  return {true, REC_SDK_ISA::row_numbers(a.row_ids[u], seed)};
}

// The aggregated and clipped gradient of a row, N columns in each thread of its team.
template <int N>
struct RowGradient {
  const GradientSums<N>& sums;
  LookupRange segment;
  int dim;
  const float* coefficients;

  // Returns columns [column, column + N), or zeros if they are not in the row.
  __device__ __forceinline__ Columns<N> at(int column) const {
    const bool active = column < dim;
    Columns<N> g = sums.sum(segment, column, active);
    const float bound = coefficients != nullptr ? coefficients[0] : INFINITY;
    for (int k = 0; k < N; ++k) g[k] = active ? REC_SDK_ISA::clip(g[k], bound) : 0.0f;
    return g;
  }
};

// The update of one row by its team.
template <class Optimizer, class Format, class States, int N>
class RowUpdate {
 public:
  __device__ __forceinline__ RowUpdate(const UpdateRows& a, const Team& team, const RowGradient<N>& gradient,
                                       const Rounding& rounding, uint8_t* record)
      : layout_(a.layout),
        team_(team),
        gradient_(gradient),
        rounding_(rounding),
        columns_(a.layout, record),
        row_states_(a.layout, record) {
    load(first_column());  // in flight while the gradients are summed
  }

  __device__ __forceinline__ void run() {
    const auto values = measured<0>(NoValues{});
    row_states_.store(team_);
    for (int column = first_column();; column += pass()) {
      if (!keeps_gradient()) g_ = gradient_.at(column);
      if (column < dim()) {
        columns_.update(optimizer(), g_, values);
        columns_.store_to(column, rounding_);
      }
      if (column - first_column() + pass() >= dim()) break;
      load(column + pass());
    }
  }

 private:
  using NoValues = REC_SDK_ISA::NoValues;

  __device__ __forceinline__ int dim() const { return static_cast<int>(layout_.dim); }
  __device__ __forceinline__ int pass() const { return team_.width * N; }
  __device__ __forceinline__ int first_column() const { return team_.lane * N; }
  // Constructs the optimizer at each use, because an optimizer kept between uses would occupy registers.
  __device__ __forceinline__ Optimizer optimizer() const { return Optimizer(gradient_.coefficients); }
  // Returns whether the gradient stays in registers, so that a row of one round sums its gradients once.
  __device__ __forceinline__ bool keeps_gradient() const {
    return Optimizer::kMeasures > 0 && dim() <= pass();
  }
  __device__ __forceinline__ void load(int column) {
    if (column < dim()) columns_.load_from(column);
  }

  // Runs the passes from kPass on, and returns the values of the last begin_row.
  template <int kPass, class Values>
  __device__ __forceinline__ auto measured(const Values& values) {
    if constexpr (kPass == Optimizer::kMeasures) {
      return values;
    } else {
      constexpr REC_SDK_ISA::Pass<kPass> kThis{};
      const auto sums = sums_of(kThis, values);
      return measured<kPass + 1>(
          optimizer().begin_row(kThis, row_states_.values(), sums, static_cast<float>(dim()), values));
    }
  }

  template <int kPass, class Values>
  __device__ __forceinline__ auto sums_of(REC_SDK_ISA::Pass<kPass> which, const Values& values) {
    using Terms = decltype(optimizer().measure(which, 0.0f, static_cast<float*>(nullptr), 0.0f, values));
    LaneSum<N> lanes[Terms::kCount];
    for (int start = 0; start < dim(); start += pass()) {
      const int column = start + first_column();
      if (kPass == 0 || !keeps_gradient()) g_ = gradient_.at(column);
      if (Optimizer::kMeasuresRecord && start > 0) load(column);
      const auto terms = columns_.measure(which, optimizer(), g_, values, column < dim());
      for (int i = 0; i < Terms::kCount; ++i) lanes[i].add(team_, terms.each[i]);
    }
    if (Optimizer::kMeasuresRecord && dim() > pass()) load(first_column());
    Terms sums;
    for (int i = 0; i < Terms::kCount; ++i) sums.each[i] = lanes[i].total(team_);
    return sums;
  }

  const RecordLayout& layout_;
  const Team& team_;
  const RowGradient<N>& gradient_;
  const Rounding rounding_;
  RecordColumns<Optimizer, Format, States, N> columns_;
  RowStates<Optimizer, States> row_states_;
  Columns<N> g_{};
};

constexpr int kBlocksPerProcessor = 4;  // limits a thread to 64 registers: more rows in flight are faster

// Updates one row per team.
template <class Optimizer, class Format, class States, int N>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerProcessor)
    update_records(const __grid_constant__ UpdateRows a, int width) {
  const Team team(width);
  if (team.index >= a.segments.rows) return;
  const int u = static_cast<int>(team.index);
  const int slot = a.segments.unique_slots[u];
  const LookupRange segment{a.segments.offsets[u], a.segments.offsets[u + 1]};
  const GradientSums<N> sums(a.segments, team);
  const RowGradient<N> gradient{sums, segment, static_cast<int>(a.layout.dim), coefficients_of(a, u)};
  const Rounding rounding = Format::kRounds ? rounding_of(a, u) : Rounding{false, 0};
  RowUpdate<Optimizer, Format, States, N>(a, team, gradient, rounding, a.cache + slot * a.layout.bytes).run();
  if (a.row_norms != nullptr) count_norms<N>(a.segments, a.row_norms, width);
}

// Returns whether records and chunk sums are aligned for loads of kVector columns.
template <class Optimizer>
bool fits_vectors(const UpdateRows& a, const void* workspace) {
  bool fits = a.layout.dim % kVector == 0 && a.layout.bytes % 16 == 0 && is_multiple(a.cache, 16) &&
              is_multiple(workspace, 16);
  for (int s = 0; s < Optimizer::kElementStates; ++s) fits = fits && a.layout.state_offset[s] % 16 == 0;
  return fits;
}

template <class Optimizer, class Format, class States, int N>
cudaError_t launch_update_records(UpdateRows a, void* workspace, cudaStream_t stream) {
  const int64_t table_bytes = gradient_table_bytes(a.segments.lookups);
  cudaError_t error = put_gradient_table(&a.segments.lookups, workspace, stream);
  if (error != cudaSuccess) return error;
  error = launch_sum_chunks<N>(&a.segments, static_cast<uint8_t*>(workspace) + table_bytes, stream);
  if (error != cudaSuccess) return error;
  const int width = team_width(a.layout.dim, N);
  return launch(update_records<Optimizer, Format, States, N>, blocks_of(a.segments.rows, width), stream, a,
                width);
}

template <class Optimizer, class Format>
cudaError_t update_with(const UpdateRows& a, void* workspace, cudaStream_t stream) {
  if (a.segments.rows == 0) return cudaSuccess;
  // Vectors are used only if all states are float32, because vector kernels for 16-bit states would double
  // the number of kernels.
  if (!a.layout.plain_states()) {
    return launch_update_records<Optimizer, Format, NarrowStates, 1>(a, workspace, stream);
  }
  return fits_vectors<Optimizer>(a, workspace)
             ? launch_update_records<Optimizer, Format, PlainStates, kVector>(a, workspace, stream)
             : launch_update_records<Optimizer, Format, PlainStates, 1>(a, workspace, stream);
}

}  // namespace cuda
}  // namespace rec_sdk
