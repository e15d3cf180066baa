// Checks of operators' arguments. Errors name the operator, the argument, its value and the allowed values.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include "op_kernels/common/arguments.h"

namespace rec_sdk {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The argument checks of one operator call. All tensors must be on the device of `reference`.
class Checker {
 public:
  Checker(const char* op, const Tensor& reference) : op_(op), reference_(reference) {}

  template <class... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (condition) return;
    std::ostringstream message;
    message << "rec_sdk::" << op_ << ": ";
    (message << ... << parts);
    throw std::runtime_error(message.str());
  }

  // Checks dtype, number of dimensions and device.
  void tensor(const char* name, const Tensor& tensor, ScalarType dtype, int64_t rank) const;
  void type_and_rank(const char* name, const Tensor& tensor, ScalarType dtype, int64_t rank) const;
  // Checks that a tensor is a contiguous vector, and returns its data; size < 0 allows any size.
  template <class T>
  T* vector(const char* name, const Tensor& tensor, ScalarType dtype, int64_t size = -1) const {
    vector_checks(name, tensor, dtype, size);
    return static_cast<T*>(tensor.data_ptr());
  }
  // Checks that a tensor is a float32 matrix with contiguous rows, and returns its data. A matrix without
  // elements may have any strides.
  float* matrix(const char* name, const Tensor& tensor) const;
  // Checks element `index` of the tensor list `name` in the same way.
  float* matrix(const char* name, size_t index, const Tensor& tensor) const;
  void contiguous(const char* name, const Tensor& tensor) const;

  Weights weights(const Tensor& weights) const;
  // Checks the arguments that describe the bags of a pooled lookup; each feature has `batch_size` bags.
  Bags bags(const Tensor& offsets, const Tensor& columns, const Tensor& mean, int64_t first_bag,
            int64_t batch_size) const;

 private:
  void vector_checks(const char* name, const Tensor& tensor, ScalarType dtype, int64_t size) const;

  const char* op_;
  const Tensor& reference_;
};

// Returns the distance between the starts of rows, in elements. For a single row, whose stride may be
// anything, it is the width.
int64_t row_stride(const Tensor& matrix);

DType storage_dtype(const Checker& check, const char* name, ScalarType dtype);

}  // namespace rec_sdk
