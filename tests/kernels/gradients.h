// The gradients of a batch as segments: empty, single, of several blocks, and hot ones of several chunks.
#pragma once

#include "tests/kernels/support.h"

namespace kernel_tests {

struct Gradients {
  static constexpr int64_t kSlots = 29;
  static constexpr int64_t kGradRows = 300;

  int64_t dim, stride;
  std::vector<float> grad, scale;
  std::vector<int32_t> unique_slots, offsets, grad_row, grad_column;
  std::vector<rec_sdk::HotRow> hot_rows;
  std::vector<rec_sdk::Chunk> chunks;
  std::vector<float> chunk_sums;

  // Scaled ones have a scale and a column for each lookup, as pooled lookups have.
  Gradients(Random* random, int64_t dim_, bool scaled) : dim(dim_), stride(dim_ + 9), offsets{0} {
    grad = random_floats(random, kGradRows * stride);
    for (const int32_t length : {1, 0, 2, 1, 31, 33, 100, 1024, 1025, 2, 2100, 1}) {
      const int64_t begin = offsets.back(), end = begin + length;
      const auto row = static_cast<int64_t>(unique_slots.size());
      unique_slots.push_back(static_cast<int32_t>((row * 7 + 3) % kSlots));
      offsets.push_back(static_cast<int32_t>(end));
      if (length <= rec_sdk::kChunkLookups) continue;
      hot_rows.push_back({row, static_cast<int64_t>(chunks.size())});
      for (int64_t first = begin; first < end; first += rec_sdk::kChunkLookups) {
        chunks.push_back({first, std::min(first + rec_sdk::kChunkLookups, end)});
      }
    }
    chunk_sums.resize(chunks.size() * static_cast<size_t>(dim));
    for (int32_t j = 0; j < offsets.back(); ++j) grad_row.push_back(random->below(kGradRows));
    if (!scaled) return;
    scale = random_floats(random, offsets.back());
    for (int32_t j = 0; j < offsets.back(); ++j) grad_column.push_back(random->below(8));
  }

  int64_t rows() const { return static_cast<int64_t>(unique_slots.size()); }

  rec_sdk::Lookups lookups() const {
    const bool scaled = !scale.empty();
    return {{grad.data(), stride, kGradRows, stride},
            grad_row.data(),
            scaled ? grad_column.data() : nullptr,
            scaled ? scale.data() : nullptr,
            offsets.back(),
            nullptr,
            nullptr,
            0};
  }

  // `split`: hot rows come as the sums of their chunks.
  rec_sdk::Segments segments(bool split) const {
    return {lookups(),
            dim,
            unique_slots.data(),
            offsets.data(),
            rows(),
            nullptr,
            0,
            hot_rows.data(),
            split ? static_cast<int64_t>(hot_rows.size()) : 0,
            chunk_sums.data()};
  }

  void sum_chunks(const CpuKernels& kernels) {
    const rec_sdk::SumChunks arguments{lookups(), dim, chunks.data(), chunk_sums.data()};
    in_ranges(static_cast<int64_t>(chunks.size()),
              [&](int64_t begin, int64_t end) { kernels.sum_chunks(arguments, begin, end); });
  }

  struct Sum {
    double value, error;  // error: a bound for a float sum in blocks
  };
  // The gradient of unique row u, [dim].
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
