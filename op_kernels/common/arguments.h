// The arguments of each operator's kernel: raw pointers and sizes, already checked, the same for every
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

// The bags of a pooled lookup. Bag k belongs to (feature f, sample b) = divmod(first_bag + k, batch_size).
struct Bags {
  const int64_t* offsets;  // [count + 1]
  int64_t count;
  int64_t first_bag;
  int64_t batch_size;
  const int64_t* columns;  // [features]: first column of the feature in a row of the output
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

// The gradient of an output of lookups. It consists of four 8-byte words, so that kernels can store tables of
// gradients.
struct Gradient {
  const float* data;  // [rows, columns], row stride `stride`
  int64_t stride;
  int64_t rows;
  int64_t columns;
};

// Lookup j contributes scale[j] * g[grad_row[j], grad_column[j] : grad_column[j] + dim], where g is
// grads[grad_source[j]], or `grad` if grad_source is null.
struct Lookups {
  Gradient grad;
  const int32_t* grad_row;     // [count]
  const int32_t* grad_column;  // [count], or null: 0
  const float* scale;          // [count], or null: 1
  int64_t count;
  const int32_t* grad_source;  // [count], or null: one gradient
  const Gradient* grads;       // [grad_count], in host memory; a launch copies it to the device
  int64_t grad_count;
};

// The CPU sums longer segments in chunks of this length, in parallel. The length is a power-of-two number of
// blocks (aggregate.h).
constexpr int64_t kChunkLookups = 1024;

struct Chunk {
  int64_t begin, end;  // lookups
};

// A unique row whose segment was summed in chunks, the first of which is first_chunk.
struct HotRow {
  int64_t row;
  int64_t first_chunk;
};

// Devices sum segments with more lookups than this in whole chunks of this length, in parallel, and then add
// the remaining lookups. The length is a power-of-two number of blocks.
constexpr int64_t kHotLookups = 128;

// A segment with more than kHotLookups lookups.
struct HotSegment {
  int32_t row;            // the unique row
  int32_t first_lookup;   // offsets[row]
  int32_t chunks;         // number of whole chunks
  int32_t chunks_before;  // number of chunks of earlier hot segments
};

// The segments of unique rows: row u has the lookups [offsets[u], offsets[u + 1]).
struct Segments {
  Lookups lookups;
  int64_t dim;
  const int32_t* unique_slots;  // [rows], distinct
  const int32_t* offsets;       // [rows + 1]
  int64_t rows;
  // For devices: all hot segments, ascending, or none. The sum of a segment is bit-identical whether or not
  // it is listed.
  const HotSegment* hot_segments;  // [hot_segment_count]
  int64_t hot_segment_count;
  // For the CPU, which computes this list from the offsets.
  const HotRow* hot_rows;  // [hot_count], ascending
  int64_t hot_count;
  const float* chunk_sums;  // [chunks, dim]; also used by CUDA
};

struct SumChunks {
  Lookups lookups;
  int64_t dim;
  const Chunk* chunks;  // [n]
  float* out;           // [n, dim]
};

constexpr int64_t kCoefficients = 16;  // number of coefficients per table

struct UpdateRows {
  Segments segments;
  uint8_t* cache;  // [slots, layout.bytes]
  RecordLayout layout;
  const int32_t* table_offsets;  // [tables + 1]
  int64_t tables;
  const float* coefficients;  // [tables, kCoefficients]
  int64_t slots;
  const int64_t* row_ids;         // [rows], or null: weights are rounded to nearest
  const int64_t* rounding_seeds;  // [tables], with row_ids
  // For each row's aggregated gradient before clipping, the sum of squares and the largest magnitude: [2,
  // rows], or null.
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
  uint8_t* cache;                 // [cache_slots, bytes]
  const uint8_t* rows;            // [count, bytes], the new rows
  uint8_t* victims;               // [victim_count, bytes], written: the rows that the victims had
  const int32_t* slots;           // [count], distinct
  const int32_t* victim_indices;  // [count], the row of `victims` for the old row of the slot: 0, 1, ... in
                                  // order; -1 if the slot is free
  int64_t bytes;
  int64_t cache_slots;
  int64_t count;
  int64_t victim_count;
};

// A swap and the lookups of its batch, which read the cache as it is after the swap. A kernel that does both
// at once reads the rows by `origins`, because the new rows are not in the cache yet.
struct SwapLookupSequence {
  SwapRows swap;  // victim_indices is null if there are no victims
  LookupSequence lookup;
  const int32_t* origins;  // [count] the lookup's slot, or swap.cache_slots + i if its row is swap.rows[i]
};
struct SwapLookupPooled {
  SwapRows swap;
  LookupPooled lookup;
  const int32_t* origins;  // [lookups]
};

}  // namespace rec_sdk
