// The gradients of a batch, with segments of all kinds: empty, of one lookup, of several blocks, and hot
// segments of several chunks.
#pragma once

#include "tests/kernels/update_batch.h"

namespace kernel_tests {

struct Gradients : UpdateBatch {
  std::vector<rec_sdk::HotRow> hot_rows;
  std::vector<rec_sdk::Chunk> chunks;
  std::vector<float> chunk_sums;

  Gradients(Random* random, int64_t dim, bool scaled)
      : UpdateBatch(random, dim, {1, 0, 2, 1, 31, 33, 100, 1024, 1025, 2, 2100, 1}, scaled) {
    for (int64_t row = 0; row < rows(); ++row) {
      const int64_t end = offsets[row + 1];
      if (end - offsets[row] <= rec_sdk::kChunkLookups) continue;
      hot_rows.push_back({row, static_cast<int64_t>(chunks.size())});
      for (int64_t first = offsets[row]; first < end; first += rec_sdk::kChunkLookups) {
        chunks.push_back({first, std::min(first + rec_sdk::kChunkLookups, end)});
      }
    }
    chunk_sums.resize(chunks.size() * static_cast<size_t>(dim));
  }

  // Returns the segments; hot rows have the sums of their chunks, which `sum_chunks` must have computed.
  rec_sdk::Segments in_chunks() const {
    rec_sdk::Segments all = joined();
    all.hot_rows = hot_rows.data();
    all.hot_count = static_cast<int64_t>(hot_rows.size());
    all.chunk_sums = chunk_sums.data();
    return all;
  }

  void sum_chunks(const CpuKernels& kernels) {
    const rec_sdk::SumChunks arguments{joined().lookups, dim, chunks.data(), chunk_sums.data()};
    in_ranges(static_cast<int64_t>(chunks.size()),
              [&](int64_t begin, int64_t end) { kernels.sum_chunks(arguments, begin, end); });
  }

  struct Sum {
    double value, error;  // error: a bound for the rounding error of a float sum in blocks
  };
  // Returns the summed gradient of unique row u in double, [dim].
  std::vector<Sum> sums(int64_t u) const {
    std::vector<Sum> all(static_cast<size_t>(dim));
    for (int32_t j = offsets[u]; j < offsets[u + 1]; ++j) {
      const float* row = &grad[grad_row[j] * stride + (grad_column.empty() ? 0 : grad_column[j])];
      for (int64_t k = 0; k < dim; ++k) {
        const double term = (scale.empty() ? 1.0 : static_cast<double>(scale[j])) * row[k];
        all[k].value += term;
        all[k].error += std::fabs(term) * kSumError;
      }
    }
    return all;
  }
};

}  // namespace kernel_tests
