// The rows of a gradient, divided into several tensors with different strides. The first and the last have no
// rows.
#pragma once

#include "tests/kernels/support.h"

namespace kernel_tests {

class SplitGradients {
 public:
  // Divides the gradient of `joined` into `count` tensors, at least 3.
  SplitGradients(Random* random, const rec_sdk::Lookups& joined, int64_t count) {
    std::vector<int64_t> borders{0, 0};  // the first tensor has no rows
    for (int64_t i = 1; i + 2 < count; ++i) borders.push_back(random->below(joined.grad.rows + 1));
    std::sort(borders.begin(), borders.end());
    borders.push_back(joined.grad.rows);
    borders.push_back(joined.grad.rows);  // the last tensor has no rows
    for (int64_t i = 0; i < count; ++i) add(joined.grad, borders[i], borders[i + 1]);
    for (int64_t j = 0; j < joined.count; ++j) {
      const int64_t row = joined.grad_row[j];
      int64_t source = 0;
      while (borders[source + 1] <= row) ++source;
      source_.push_back(static_cast<int32_t>(source));
      row_.push_back(static_cast<int32_t>(row - borders[source]));
    }
  }

  rec_sdk::Lookups lookups(rec_sdk::Lookups joined) const {
    joined.grad = grads_.front();
    joined.grad_row = row_.data();
    joined.grad_source = source_.data();
    joined.grads = grads_.data();
    joined.grad_count = static_cast<int64_t>(grads_.size());
    return joined;
  }

 private:
  void add(const rec_sdk::Gradient& joined, int64_t begin, int64_t end) {
    const int64_t stride = joined.stride + static_cast<int64_t>(grads_.size() % 3) * 4;
    std::vector<float> rows(static_cast<size_t>((end - begin) * stride), NAN);
    for (int64_t r = begin; r < end; ++r) {
      std::copy_n(joined.data + r * joined.stride, joined.columns, rows.data() + (r - begin) * stride);
    }
    data_.push_back(std::move(rows));
    grads_.push_back({data_.back().data(), stride, end - begin, joined.columns});
  }

  std::vector<std::vector<float>> data_;
  std::vector<rec_sdk::Gradient> grads_;
  std::vector<int32_t> source_, row_;
};

}  // namespace kernel_tests
