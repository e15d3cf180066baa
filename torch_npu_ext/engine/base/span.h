// A view of consecutive values in memory that it does not own.
#pragma once

#include <cstdint>
#include <vector>

namespace rec_sdk {

template <class T>
class Span {
 public:
  Span(const T* values, int64_t count) : values_(values), count_(count) {}
  Span(const std::vector<T>& values)
      : Span(values.data(), static_cast<int64_t>(values.size())) {}  // implicit conversion
  const T* data() const { return values_; }
  int64_t size() const { return count_; }
  const T* begin() const { return values_; }
  const T* end() const { return values_ + count_; }
  const T& operator[](int64_t i) const { return values_[i]; }

 private:
  const T* values_;
  int64_t count_;
};

}  // namespace rec_sdk
