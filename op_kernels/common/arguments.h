// The arguments of each operator's kernel: raw pointers and sizes, already checked. The same for every
// backend.
#pragma once

#include <cstdint>

#include "op_kernels/common/record.h"

namespace rec_sdk {

// The weights of a cache: row s starts at data + s * stride_bytes.
struct Weights {
  const uint8_t* data;
  int64_t stride_bytes;
  int64_t rows;
  int64_t dim;
  DType dtype;
};

// The bags of a pooled lookup. Bag k is (feature f, sample b) = divmod(first_bag + k, batch_size).
struct Bags {
  const int64_t* offsets;  // [count + 1]
  int64_t count;
  int64_t first_bag;
  int64_t batch_size;
  const int64_t* columns;  // [features]: where the feature's slice starts in a row of the output
  const bool* mean;        // [features]
  int64_t features;
};

struct LookupSequence {
  Weights weights;
  const int32_t* slots;  // [count]
  float* out;            // [count, dim]
  int64_t count;
};

struct LookupPooled {
  Weights weights;
  const int32_t* slots;             // [lookups]
  const float* per_sample_weights;  // [lookups] or null
  Bags bags;
  float* out;  // [batch_size, out_columns], row stride out_stride
  int64_t out_stride;
  int64_t out_columns;
  int64_t lookups;
};

struct PooledWeightsGrad {
  Weights weights;
  const int32_t* slots;  // [lookups]
  Bags bags;
  const float* grad;  // [batch_size, grad_columns], row stride grad_stride
  int64_t grad_stride;
  float* out;  // [lookups]
  int64_t grad_columns;
  int64_t lookups;
};

// Gradient of an output of lookups. Four words: kernels keep tables of them.
struct Gradient {
  const float* data;  // [rows, columns], row stride `stride`
  int64_t stride;
  int64_t rows;
  int64_t columns;
};

// Lookup j contributes scale[j] * g[grad_row[j], grad_column[j] : grad_column[j] + dim], where g is
// grads[grad_source[j]], or `grad` without grad_source.
struct Lookups {
  Gradient grad;
  const int32_t* grad_row;     // [count]
  const int32_t* grad_column;  // [count], or null: 0
  const float* scale;          // [count], or null: 1
  int64_t count;
  const int32_t* grad_source;  // [count], or null: there is one gradient
  const Gradient* grads;       // [grad_count], in memory of the host; a launch takes it to its device
  int64_t grad_count;
};

// The CPU sums segments longer than this in chunks of it, in parallel. A power of two of blocks
// (aggregate.h).
constexpr int64_t kChunkLookups = 1024;

struct Chunk {
  int64_t begin, end;  // lookups
};

// A unique row whose segment was summed in chunks, from first_chunk on.
struct HotRow {
  int64_t row;
  int64_t first_chunk;
};

// Devices sum segments of more lookups than this in whole chunks of it, in parallel, and what is left behind
// them. A power of two of blocks.
constexpr int64_t kHotLookups = 128;

// Such a segment.
struct HotSegment {
  int32_t row;            // the unique row
  int32_t first_lookup;   // offsets[row]
  int32_t chunks;         // whole ones
  int32_t chunks_before;  // of the hot segments before it
};

// Unique row u has the lookups [offsets[u], offsets[u + 1]).
struct Segments {
  Lookups lookups;
  int64_t dim;
  const int32_t* unique_slots;  // [rows], distinct
  const int32_t* offsets;       // [rows + 1]
  int64_t rows;
  // Devices have these: all hot segments, ascending, or none. Each is summed as the others are: to the same
  // bits.
  const HotSegment* hot_segments;  // [hot_segment_count]
  int64_t hot_segment_count;
  // The CPU has these, which it finds in the offsets.
  const HotRow* hot_rows;  // [hot_count], ascending
  int64_t hot_count;
  const float* chunk_sums;  // [chunks, dim]; of CUDA as well
};

struct SumChunks {
  Lookups lookups;
  int64_t dim;
  const Chunk* chunks;  // [n]
  float* out;           // [n, dim]
};

constexpr int64_t kCoefficients = 16;  // per table

struct UpdateRows {
  Segments segments;
  uint8_t* cache;  // [slots, layout.bytes]
  RecordLayout layout;
  const int32_t* table_offsets;  // [tables + 1]
  int64_t tables;
  const float* coefficients;  // [tables, kCoefficients]
  int64_t slots;
  const int64_t* row_ids;         // [rows], or null: weights round to nearest
  const int64_t* rounding_seeds;  // [tables], with row_ids
  // [2, rows], or null: of the aggregated gradient of each row, before it is clipped, the sum of squares and
  // the largest magnitude.
  float* row_norms;
};

struct AccumulateRows {
  Segments segments;
  float* pending;  // [slots, 2 * dim]: sum, compensation
  int64_t slots;
};

struct CopyRows {
  uint8_t* cache;        // [cache_slots, bytes]; read only when gathering
  uint8_t* rows;         // [count, bytes]; read only when scattering
  const int32_t* slots;  // [count]
  int64_t bytes;
  int64_t cache_slots;
  int64_t count;
};

struct SwapRows {
  uint8_t* cache;        // [cache_slots, bytes]
  const uint8_t* rows;   // [count, bytes], those that come
  uint8_t* leaving;      // [leaving_count, bytes]
  const int32_t* slots;  // [count], distinct
  const int32_t*
      places;  // [count], of the row that leaves among `leaving`: 0, 1, ... in order; -1 if none does
  int64_t bytes;
  int64_t cache_slots;
  int64_t count;
  int64_t leaving_count;
};

// A swap, and the lookups of the batch that it is for, which read the cache as the swap leaves it. A kernel
// that does both at once reads by `origins`: there is nothing in the cache yet of a row that comes.
struct SwapLookupSequence {
  SwapRows swap;  // places is null where no row leaves
  LookupSequence lookup;
  const int32_t* origins;  // [count] of a lookup its slot, or swap.cache_slots + i: it is of swap.rows[i]
};
struct SwapLookupPooled {
  SwapRows swap;
  LookupPooled lookup;
  const int32_t* origins;  // [lookups]
};

}  // namespace rec_sdk
