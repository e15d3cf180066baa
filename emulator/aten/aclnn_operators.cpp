// The aclnn operators that torch_npu calls without ATen's dispatcher: copies, fills, and the padding, scaling
// and merging that its collectives use. For all other operators there is the fallback (fallback.cpp).
#include <ATen/ops/add.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>

#include "aclnn.h"

namespace {

using at::Scalar;
using at::Tensor;

void copy(Tensor self, Tensor source) { self.copy_(source); }
void cast(Tensor self, aclDataType, Tensor out) { out.copy_(self); }  // `out` already has the requested type
void zero(Tensor self) { self.zero_(); }
void one(Tensor self) { self.fill_(1); }
void fill(Tensor self, Scalar value) { self.fill_(value); }
void fill_tensor(Tensor self, Tensor value) { self.fill_(value.reshape({})); }

void add(Tensor self, Tensor other, Scalar alpha, Tensor out) { out.copy_(at::add(self, other, alpha)); }
void add_scalar(Tensor self, Scalar other, Scalar alpha, Tensor out) {
  out.copy_(at::add(self, other, alpha));
}
void add_in_place(Tensor self, Tensor other, Scalar alpha) { self.add_(other, alpha); }
void multiply(Tensor self, Tensor other, Tensor out) { out.copy_(at::mul(self, other)); }
void multiply_scalar(Tensor self, Scalar other, Tensor out) { out.copy_(at::mul(self, other)); }
void multiply_in_place(Tensor self, Tensor other) { self.mul_(other); }
void multiply_scalar_in_place(Tensor self, Scalar other) { self.mul_(other); }
void divide(Tensor self, Tensor other, Tensor out) { out.copy_(at::div(self, other)); }
void divide_scalar(Tensor self, Scalar other, Tensor out) { out.copy_(at::div(self, other)); }
void divide_in_place(Tensor self, Tensor other) { self.div_(other); }
void divide_scalar_in_place(Tensor self, Scalar other) { self.div_(other); }

void complex(Tensor real, Tensor imaginary, Tensor out) { out.copy_(at::complex(real, imaginary)); }

void pad(Tensor self, std::vector<int64_t> sizes, Scalar value, Tensor out) {
  out.copy_(at::constant_pad_nd(self, sizes, value));
}

}  // namespace

REC_SDK_ACLNN_2(InplaceCopy, copy)
REC_SDK_ACLNN_3(Cast, cast)
REC_SDK_ACLNN_1(InplaceZero, zero)
REC_SDK_ACLNN_1(InplaceOne, one)
REC_SDK_ACLNN_2(InplaceFillScalar, fill)
REC_SDK_ACLNN_2(InplaceFillTensor, fill_tensor)
REC_SDK_ACLNN_4(Add, add)
REC_SDK_ACLNN_4(Adds, add_scalar)
REC_SDK_ACLNN_3(InplaceAdd, add_in_place)
REC_SDK_ACLNN_3(Mul, multiply)
REC_SDK_ACLNN_3(Muls, multiply_scalar)
REC_SDK_ACLNN_2(InplaceMul, multiply_in_place)
REC_SDK_ACLNN_2(InplaceMuls, multiply_scalar_in_place)
REC_SDK_ACLNN_3(Div, divide)
REC_SDK_ACLNN_3(Divs, divide_scalar)
REC_SDK_ACLNN_2(InplaceDiv, divide_in_place)
REC_SDK_ACLNN_2(InplaceDivs, divide_scalar_in_place)
REC_SDK_ACLNN_3(Complex, complex)
REC_SDK_ACLNN_4(ConstantPadNd, pad)
