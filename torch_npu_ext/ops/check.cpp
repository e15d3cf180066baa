#include "torch_npu_ext/ops/check.h"

#include "torch_npu_ext/ops/arguments.h"

namespace rec_sdk {

void Checker::type_and_rank(const char* name, const Tensor& tensor, ScalarType dtype, int64_t rank) const {
  require(tensor.scalar_type() == dtype, name, " must be ", toString(dtype), ", got ",
          toString(tensor.scalar_type()));
  require(tensor.dim() == rank, name, " must have ", rank, " dimension(s), got ", tensor.dim());
}

void Checker::tensor(const char* name, const Tensor& tensor, ScalarType dtype, int64_t rank) const {
  type_and_rank(name, tensor, dtype, rank);
  require(tensor.device() == reference_.device(), name, " must be on the device of the first argument");
}

void Checker::vector_checks(const char* name, const Tensor& tensor, ScalarType dtype, int64_t size) const {
  this->tensor(name, tensor, dtype, 1);
  require(size < 0 || tensor.size(0) == size, name, " must have ", size, " element(s), got ", tensor.size(0));
  contiguous(name, tensor);
}

void Checker::contiguous(const char* name, const Tensor& tensor) const {
  require(tensor.is_contiguous(), name, " must be contiguous; call .contiguous() on it");
}

float* Checker::matrix(const char* name, const Tensor& tensor) const {
  this->tensor(name, tensor, ScalarType::Float, 2);
  const int64_t rows = tensor.size(0), columns = tensor.size(1);
  if (rows > 0 && columns > 1) {
    require(tensor.stride(1) == 1, name, " must have stride(1) = 1, got ", tensor.stride(1));
  }
  if (rows > 1 && columns > 0) {
    require(tensor.stride(0) >= columns, name, " must have stride(0) >= size(1) = ", columns, ", got ",
            tensor.stride(0));
  }
  return static_cast<float*>(tensor.data_ptr());
}

float* Checker::matrix(const char* name, size_t index, const Tensor& tensor) const {
  try {
    return matrix(name, tensor);
  } catch (const std::runtime_error&) {
    // The name is built only after an error, because that costs more than the checks.
    return matrix((std::string(name) + "[" + std::to_string(index) + "]").c_str(), tensor);
  }
}

int64_t row_stride(const Tensor& matrix) { return matrix.size(0) > 1 ? matrix.stride(0) : matrix.size(1); }

Gradients gradients_of(const char* op, const Tensor& cache, const Tensors& grads) {
  const Checker check(op, cache);
  check.require(!grads.empty(), "grads must have at least one gradient, got none");
  Gradients gradients;
  gradients.reserve(grads.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    const Tensor& grad = grads[i];
    const float* data = check.matrix("grads", i, grad);
    gradients.push_back({data, row_stride(grad), grad.size(0), grad.size(1)});
  }
  return gradients;
}

DType storage_dtype(const Checker& check, const char* name, ScalarType dtype) {
  if (dtype == ScalarType::Half) return DType::kFloat16;
  if (dtype == ScalarType::BFloat16) return DType::kBFloat16;
  check.require(dtype == ScalarType::Float, name, " must be of Float, Half or BFloat16, got ",
                toString(dtype));
  return DType::kFloat32;
}

Weights Checker::weights(const Tensor& weights) const {
  const DType dtype = storage_dtype(*this, "weights", weights.scalar_type());
  tensor("weights", weights, weights.scalar_type(), 2);
  require(weights.size(1) >= 1 && weights.size(1) <= kMaxDim, "weights must have from 1 to ", kMaxDim,
          " columns, got ", weights.size(1));
  require(weights.size(1) == 1 || weights.stride(1) == 1, "weights must have stride(1) = 1, got ",
          weights.stride(1));
  require(weights.stride(0) >= weights.size(1) || weights.size(0) <= 1,
          "weights must have stride(0) >= size(1) = ", weights.size(1), ", got ", weights.stride(0));
  const int64_t stride_bytes = row_stride(weights) * static_cast<int64_t>(weights.element_size());
  return {static_cast<const uint8_t*>(weights.data_ptr()), stride_bytes, weights.size(0), weights.size(1),
          dtype};
}

Bags Checker::bags(const Tensor& offsets, const Tensor& columns, const Tensor& mean, int64_t first_bag,
                   int64_t batch_size) const {
  const int64_t* starts = vector<const int64_t>("offsets", offsets, ScalarType::Long);
  require(offsets.size(0) >= 1, "offsets must have bags + 1 elements, got none");
  const int64_t count = offsets.size(0) - 1;
  const int64_t* column = vector<const int64_t>("columns", columns, ScalarType::Long);
  const bool* means = vector<const bool>("mean", mean, ScalarType::Bool, columns.size(0));
  int64_t all = 0;
  require(!__builtin_mul_overflow(columns.size(0), batch_size, &all), columns.size(0),
          " feature(s) with a batch of ", batch_size, " are too many bags");
  require(first_bag >= 0, "first_bag must not be negative, got ", first_bag);
  require(count == 0 || count <= all - first_bag, "bags ", first_bag, " to ", first_bag, " + ", count,
          " exceed the ", all, " bags of ", columns.size(0), " feature(s) with a batch of ", batch_size);
  return {starts, count, first_bag, batch_size, column, means, columns.size(0)};
}

}  // namespace rec_sdk
