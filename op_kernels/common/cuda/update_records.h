// The update of rows: a team sums the gradients of a row and applies the optimizer to the row's record.
#pragma once

#include "op_kernels/common/cuda/gradient_table.h"
#include "op_kernels/common/cuda/hot_rows.h"
#include "op_kernels/common/cuda/lane_sum.h"
#include "op_kernels/common/optimizers.h"

namespace rec_sdk {
namespace cuda {

// A thread's columns of a record, in registers.
template <class Optimizer, class Format, int N>
class RecordColumns {
 public:
  __device__ __forceinline__ RecordColumns(const RecordLayout& layout, uint8_t* record)
      : layout_(layout), record_(record) {}

  __device__ __forceinline__ void load_from(int column) {
    weights_ = load<Format, N>(weights(column)).unpack();
    for (int s = 0; s < kStates; ++s) states_[s] = load<Float32, N>(state(s, column)).unpack();
  }
  template <class Row>
  __device__ __forceinline__ void update(const Optimizer& optimizer, const Columns<N>& g, const Row& row) {
    for (int k = 0; k < N; ++k) {
      float states[kStates + 1];
      for (int s = 0; s < kStates; ++s) states[s] = states_[s][k];
      optimizer.element(weights_[k], states, g[k], row);
      for (int s = 0; s < kStates; ++s) states_[s][k] = states[s];
    }
  }
  __device__ __forceinline__ void store_to(int column) const {
    store<Format>(weights(column), weights_);
    for (int s = 0; s < kStates; ++s) store<Float32>(state(s, column), states_[s]);
  }

 private:
  static constexpr int kStates = Optimizer::kElementStates;

  __device__ __forceinline__ typename Format::Storage* weights(int column) const {
    return reinterpret_cast<typename Format::Storage*>(record_) + column;
  }
  __device__ __forceinline__ float* state(int s, int column) const {
    return reinterpret_cast<float*>(record_ + layout_.state_offset[s]) + column;
  }

  const RecordLayout& layout_;
  uint8_t* record_;
  Columns<N> weights_{}, states_[kStates + 1]{};
};

// The states of a record that belong to the row as a whole.
template <class Optimizer>
class RowStates {
 public:
  __device__ __forceinline__ RowStates(const RecordLayout& layout, uint8_t* record)
      : layout_(layout), record_(record) {
    for (int s = 0; s < kStates; ++s) values_[s] = *state(s);
  }

  // All threads of the team compute the same, and one writes.
  __device__ __forceinline__ auto begin_row(const Optimizer& optimizer, const Team& team, float mean_square) {
    const auto row = optimizer.begin_row(values_, mean_square);
    if (kStates > 0) {
      __syncwarp(team.mask);  // all have read
      for (int s = 0; s < kStates; ++s) {
        if (team.lane == 0) *state(s) = values_[s];
      }
    }
    return row;
  }

 private:
  static constexpr int kStates = Optimizer::kRowStates;

  __device__ __forceinline__ float* state(int s) const {
    return reinterpret_cast<float*>(record_ + layout_.state_offset[Optimizer::kElementStates + s]);
  }

  const RecordLayout& layout_;
  uint8_t* record_;
  float values_[kStates + 1];
};

// Tables share a launch, but not their coefficients. Null: no clipping, and an optimizer that needs none.
__device__ __forceinline__ const float* coefficients_of(const UpdateRows& a, int u) {
  if (a.coefficients == nullptr) return nullptr;
  return a.coefficients + last_at_most(a.table_offsets, a.tables, u) * kCoefficients;
}

// The aggregated and clipped gradient of a row, N columns in each thread of its team.
template <int N>
struct RowGradient {
  const GradientSums<N>& sums;
  LookupRange segment;
  int dim;
  const float* coefficients;

  // Zeros where these are not columns of the row.
  __device__ __forceinline__ Columns<N> at(int column) const {
    const bool active = column < dim;
    Columns<N> g = sums.sum(segment, column, active);
    const float bound = coefficients != nullptr ? coefficients[0] : INFINITY;
    for (int k = 0; k < N; ++k) g[k] = active ? REC_SDK_ISA::clip(g[k], bound) : 0.0f;
    return g;
  }
};

// The mean of g * g over a row; *g becomes the gradient of the last columns.
template <int N>
__device__ __forceinline__ float mean_square(const RowGradient<N>& gradient, const Team& team, int dim,
                                             Columns<N>* g) {
  LaneSum<N> lanes(team);
  for (int start = 0; start < dim; start += team.width * N) {
    *g = gradient.at(start + team.lane * N);
    Columns<N> squares;
    for (int k = 0; k < N; ++k) squares[k] = (*g)[k] * (*g)[k];
    lanes.add(squares);
  }
  return lanes.total() / static_cast<float>(dim);
}

constexpr int kBlocksPerProcessor = 4;  // 64 registers: rows in flight are worth more

// A team per row. Coefficients are read where they are used, since until then they would take registers.
template <class Optimizer, class Format, int N>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerProcessor)
    update_records(const __grid_constant__ UpdateRows a, int width) {
  const Team team(width);
  if (team.index >= a.segments.rows) return;
  const int u = static_cast<int>(team.index), dim = static_cast<int>(a.layout.dim), pass = width * N;
  const int slot = a.segments.unique_slots[u];
  const LookupRange segment{a.segments.offsets[u], a.segments.offsets[u + 1]};
  const float* coefficients = coefficients_of(a, u);

  uint8_t* record = a.cache + slot * a.layout.bytes;
  int column = team.lane * N;
  RecordColumns<Optimizer, Format, N> columns(a.layout, record);
  if (column < dim) columns.load_from(column);  // in flight while the gradients are summed
  RowStates<Optimizer> row_states(a.layout, record);

  const GradientSums<N> sums(a.segments, team);
  const RowGradient<N> gradient{sums, segment, dim, coefficients};
  Columns<N> g;
  const float mean = Optimizer::kMeanSquare ? mean_square(gradient, team, dim, &g) : 0.0f;
  const auto row = row_states.begin_row(Optimizer(coefficients), team, mean);
  for (int start = 0;;) {
    if (!Optimizer::kMeanSquare || dim > pass) g = gradient.at(column);
    if (column < dim) {
      columns.update(Optimizer(coefficients), g, row);
      columns.store_to(column);
    }
    start += pass;
    if (start >= dim) break;
    column += pass;
    if (column < dim) columns.load_from(column);
  }
}

// Whether records, chunk sums and rows of them start at multiples of what N columns need.
template <class Optimizer>
bool fits_vectors(const UpdateRows& a, const void* workspace) {
  bool fits = a.layout.dim % kVector == 0 && a.layout.bytes % 16 == 0 && is_multiple(a.cache, 16) &&
              is_multiple(workspace, 16);
  for (int s = 0; s < Optimizer::kElementStates; ++s) fits = fits && a.layout.state_offset[s] % 16 == 0;
  return fits;
}

template <class Optimizer, class Format, int N>
cudaError_t launch_update_records(UpdateRows a, void* workspace, cudaStream_t stream) {
  const int64_t table_bytes = gradient_table_bytes(a.segments.lookups);
  cudaError_t error = put_gradient_table(&a.segments.lookups, workspace, stream);
  if (error != cudaSuccess) return error;
  error = launch_sum_chunks<N>(&a.segments, static_cast<uint8_t*>(workspace) + table_bytes, stream);
  if (error != cudaSuccess) return error;
  const int width = team_width(a.layout.dim, N);
  return launch(update_records<Optimizer, Format, N>, blocks_of(a.segments.rows, width), stream, a, width);
}

template <class Optimizer, class Format>
cudaError_t update_with(const UpdateRows& a, void* workspace, cudaStream_t stream) {
  if (a.segments.rows == 0) return cudaSuccess;
  return fits_vectors<Optimizer>(a, workspace)
             ? launch_update_records<Optimizer, Format, kVector>(a, workspace, stream)
             : launch_update_records<Optimizer, Format, 1>(a, workspace, stream);
}

}  // namespace cuda
}  // namespace rec_sdk
