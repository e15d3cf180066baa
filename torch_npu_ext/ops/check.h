// Argument checks. An error names the operator and the argument, what was given and what is allowed.
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

// The checks of one call. `reference` fixes the device.
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

  // Type, rank and device.
  void tensor(const char* name, const Tensor& tensor, ScalarType dtype, int64_t rank) const;
  void type_and_rank(const char* name, const Tensor& tensor, ScalarType dtype, int64_t rank) const;
  // A contiguous vector; size < 0: any.
  template <class T>
  T* vector(const char* name, const Tensor& tensor, ScalarType dtype, int64_t size = -1) const {
    vector_checks(name, tensor, dtype, size);
    return static_cast<T*>(tensor.data_ptr());
  }
  // A float32 matrix whose rows are contiguous; returns its data. One without elements may have any strides.
  float* matrix(const char* name, const Tensor& tensor) const;
  // The same for name[index].
  float* matrix(const char* name, size_t index, const Tensor& tensor) const;
  void contiguous(const char* name, const Tensor& tensor) const;

  Weights weights(const Tensor& weights) const;
  // `columns` is the width of the matrix that the bags write to or read from.
  Bags bags(const Tensor& offsets, const Tensor& columns, const Tensor& mean, int64_t first_bag,
            int64_t batch_size) const;

 private:
  void vector_checks(const char* name, const Tensor& tensor, ScalarType dtype, int64_t size) const;

  const char* op_;
  const Tensor& reference_;
};

// From one row to the next; that of a single row may be anything in torch, and is its width here.
int64_t row_stride(const Tensor& matrix);

DType storage_dtype(const Checker& check, const char* name, ScalarType dtype);

}  // namespace rec_sdk
