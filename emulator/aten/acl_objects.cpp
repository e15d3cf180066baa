#include "acl_objects.h"

#include <cstdio>
#include <cstring>

#define REC_SDK_EXPORT extern "C" __attribute__((visibility("default")))

namespace rec_sdk::emulator {
namespace {

struct TypePair {
  aclDataType acl;
  at::ScalarType aten;
};

constexpr TypePair kTypes[] = {
    {ACL_FLOAT, at::kFloat},
    {ACL_FLOAT16, at::kHalf},
    {ACL_BF16, at::kBFloat16},
    {ACL_DOUBLE, at::kDouble},
    {ACL_INT8, at::kChar},
    {ACL_UINT8, at::kByte},
    {ACL_INT16, at::kShort},
    {ACL_INT32, at::kInt},
    {ACL_INT64, at::kLong},
    {ACL_UINT16, at::kUInt16},
    {ACL_UINT32, at::kUInt32},
    {ACL_UINT64, at::kUInt64},
    {ACL_BOOL, at::kBool},
    {ACL_COMPLEX32, at::kComplexHalf},
    {ACL_COMPLEX64, at::kComplexFloat},
    {ACL_COMPLEX128, at::kComplexDouble},
};

template <class T>
c10::Scalar load(const void* value) {
  T loaded;
  std::memcpy(&loaded, value, sizeof loaded);
  return c10::Scalar(loaded);
}

c10::Scalar load_scalar(const void* value, aclDataType type) {
  switch (type) {
    case ACL_FLOAT:
      return load<float>(value);
    case ACL_FLOAT16:
      return load<at::Half>(value);
    case ACL_BF16:
      return load<at::BFloat16>(value);
    case ACL_DOUBLE:
      return load<double>(value);
    case ACL_INT8:
      return load<int8_t>(value);
    case ACL_UINT8:
      return load<uint8_t>(value);
    case ACL_INT16:
      return load<int16_t>(value);
    case ACL_INT32:
      return load<int32_t>(value);
    case ACL_INT64:
      return load<int64_t>(value);
    case ACL_UINT64:
      return load<uint64_t>(value);
    case ACL_BOOL:
      return load<bool>(value);
    case ACL_COMPLEX64:
      return load<c10::complex<float>>(value);
    case ACL_COMPLEX128:
      return load<c10::complex<double>>(value);
    default:
      TORCH_CHECK(false, "emulated NPU: no scalar of ACL data type ", static_cast<int>(type));
  }
}

template <class Object>
int destroy(const Object* object) {
  delete object;
  return ACL_SUCCESS;
}

}  // namespace

at::ScalarType scalar_type(aclDataType type) {
  for (const TypePair& pair : kTypes) {
    if (pair.acl == type) return pair.aten;
  }
  TORCH_CHECK(false, "emulated NPU: no tensor of ACL data type ", static_cast<int>(type));
}

}  // namespace rec_sdk::emulator

using rec_sdk::emulator::destroy;

REC_SDK_EXPORT aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, aclDataType type,
                                          const int64_t* strides, int64_t offset, aclFormat, const int64_t*,
                                          uint64_t, void* data) {
  return new aclTensor{{sizes, sizes + dims}, {strides, strides + dims}, offset, type, data};
}

REC_SDK_EXPORT aclScalar* aclCreateScalar(void* value, aclDataType type) {
  try {
    return new aclScalar{type, rec_sdk::emulator::load_scalar(value, type)};
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return nullptr;
  }
}

REC_SDK_EXPORT aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return new aclIntArray{{values, values + size}};
}

REC_SDK_EXPORT aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return new aclFloatArray{{values, values + size}};
}

REC_SDK_EXPORT aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
  return new aclBoolArray{std::vector<bool>(values, values + size)};
}

REC_SDK_EXPORT aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size) {
  return new aclTensorList{{tensors, tensors + size}};
}

REC_SDK_EXPORT aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t size) {
  return new aclScalarList{{scalars, scalars + size}};
}

REC_SDK_EXPORT int aclDestroyTensor(const aclTensor* tensor) { return destroy(tensor); }
REC_SDK_EXPORT int aclDestroyScalar(const aclScalar* scalar) { return destroy(scalar); }
REC_SDK_EXPORT int aclDestroyIntArray(const aclIntArray* array) { return destroy(array); }
REC_SDK_EXPORT int aclDestroyFloatArray(const aclFloatArray* array) { return destroy(array); }
REC_SDK_EXPORT int aclDestroyBoolArray(const aclBoolArray* array) { return destroy(array); }
REC_SDK_EXPORT int aclDestroyAclOpExecutor(aclOpExecutor* executor) { return destroy(executor); }

// Destroys the tensors of the list too, because a list owns its tensors.
REC_SDK_EXPORT int aclDestroyTensorList(const aclTensorList* list) {
  for (const aclTensor* tensor : list->tensors) delete tensor;
  return destroy(list);
}

REC_SDK_EXPORT int aclDestroyScalarList(const aclScalarList* list) {
  for (const aclScalar* scalar : list->scalars) delete scalar;
  return destroy(list);
}
