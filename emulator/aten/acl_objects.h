// The objects behind the opaque handles of the aclnn interface. They describe tensors and scalars, but own no
// device memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <acl/acl_base.h>
#include <c10/core/Scalar.h>

#include <functional>
#include <vector>

struct aclTensor {
  std::vector<int64_t> sizes, strides;
  int64_t offset;  // in elements
  aclDataType type;
  void* data;  // device address
};

struct aclScalar {
  aclDataType type;
  c10::Scalar value;
};

struct aclIntArray {
  std::vector<int64_t> values;
};

struct aclFloatArray {
  std::vector<float> values;
};

struct aclBoolArray {
  std::vector<bool> values;
};

struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};

struct aclScalarList {
  std::vector<const aclScalar*> scalars;
};

struct aclOpExecutor {
  std::function<void()> work;  // the work that the stream executes
};

namespace rec_sdk::emulator {

at::ScalarType scalar_type(aclDataType type);  // throws c10::Error for a type that ATen does not have

}  // namespace rec_sdk::emulator
