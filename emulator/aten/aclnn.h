// Macros that define the two C functions of an aclnn operator from one function on CPU tensors.
//
//   void add(at::Tensor self, at::Tensor other, at::Scalar alpha, at::Tensor out);
//   REC_SDK_ACLNN_4(Add, add)
//
// defines aclnnAddGetWorkspaceSize(const aclTensor*, const aclTensor*, const aclScalar*, const aclTensor*,
// ...) and aclnnAdd. aclnnAddGetWorkspaceSize copies what its arguments describe, because the caller may
// destroy their handles before the operator runs. aclnnAdd puts the function on the stream, where it runs on
// device memory.
#pragma once

#include <ATen/core/grad_mode.h>

#include <tuple>
#include <type_traits>

#include "../acl/emulator.h"
#include "acl_objects.h"
#include "host_view.h"

namespace rec_sdk::emulator {

// The conversion of arguments, for each parameter type of an operator's function: the type that aclnn passes,
// the value that is kept until the operator runs, and the conversion of that value to the parameter.
template <class T>
struct Argument {  // for numbers and enums
  using Abi = T;
  using Kept = T;
  static Kept keep(Abi value) { return value; }
  static T see(const Kept& value) { return value; }
};

template <>
struct Argument<at::Tensor> {
  using Abi = const aclTensor*;
  using Kept = aclTensor;
  static Kept keep(Abi tensor) { return *tensor; }
  static at::Tensor see(const Kept& tensor) {
    const at::ScalarType type = scalar_type(tensor.type);
    const int64_t offset = tensor.offset * static_cast<int64_t>(c10::elementSize(type));
    return host_view(static_cast<const char*>(tensor.data) + offset, tensor.sizes, tensor.strides, type);
  }
};

template <>
struct Argument<at::Scalar> {
  using Abi = const aclScalar*;
  using Kept = at::Scalar;
  static Kept keep(Abi scalar) { return scalar->value; }
  static at::Scalar see(const Kept& scalar) { return scalar; }
};

template <>
struct Argument<std::vector<int64_t>> {
  using Abi = const aclIntArray*;
  using Kept = std::vector<int64_t>;
  static Kept keep(Abi array) { return array->values; }
  static Kept see(const Kept& values) { return values; }
};

template <class... T>
std::tuple<Argument<T>...> arguments_of(void (*)(T...));

template <auto function, size_t index>
using AbiOf = typename std::tuple_element_t<index, decltype(arguments_of(function))>::Abi;

template <class... T>
aclOpExecutor* note(void (*function)(T...), typename Argument<T>::Abi... arguments) {
  return new aclOpExecutor{[function, kept = std::make_tuple(Argument<T>::keep(arguments)...)] {
    std::apply([&](const auto&... k) { function(Argument<T>::see(k)...); }, kept);
  }};
}

inline int launch(const char* name, aclOpExecutor* executor, void* stream) {
  std::function<void()> work = std::move(executor->work);
  delete executor;
  on_stream(stream, name, [work = std::move(work)] {
    at::NoGradGuard no_grad;
    work();
  });
  return ACL_SUCCESS;
}

}  // namespace rec_sdk::emulator

#define REC_SDK_ACLNN_EXPORT extern "C" __attribute__((visibility("default"))) int

#define REC_SDK_ACLNN_RUN(name)                                                              \
  REC_SDK_ACLNN_EXPORT aclnn##name(void*, uint64_t, aclOpExecutor* executor, void* stream) { \
    return rec_sdk::emulator::launch("aclnn" #name, executor, stream);                       \
  }

#define REC_SDK_ACLNN_ARG(function, index) rec_sdk::emulator::AbiOf<&function, index>

#define REC_SDK_ACLNN_1(name, function)                                                                     \
  REC_SDK_ACLNN_EXPORT aclnn##name##GetWorkspaceSize(REC_SDK_ACLNN_ARG(function, 0) a, uint64_t* workspace, \
                                                     aclOpExecutor** executor) {                            \
    *workspace = 0;                                                                                         \
    *executor = rec_sdk::emulator::note(&function, a);                                                      \
    return ACL_SUCCESS;                                                                                     \
  }                                                                                                         \
  REC_SDK_ACLNN_RUN(name)

#define REC_SDK_ACLNN_2(name, function)                                                                     \
  REC_SDK_ACLNN_EXPORT aclnn##name##GetWorkspaceSize(REC_SDK_ACLNN_ARG(function, 0) a,                      \
                                                     REC_SDK_ACLNN_ARG(function, 1) b, uint64_t* workspace, \
                                                     aclOpExecutor** executor) {                            \
    *workspace = 0;                                                                                         \
    *executor = rec_sdk::emulator::note(&function, a, b);                                                   \
    return ACL_SUCCESS;                                                                                     \
  }                                                                                                         \
  REC_SDK_ACLNN_RUN(name)

#define REC_SDK_ACLNN_3(name, function)                                                                     \
  REC_SDK_ACLNN_EXPORT aclnn##name##GetWorkspaceSize(                                                       \
      REC_SDK_ACLNN_ARG(function, 0) a, REC_SDK_ACLNN_ARG(function, 1) b, REC_SDK_ACLNN_ARG(function, 2) c, \
      uint64_t* workspace, aclOpExecutor** executor) {                                                      \
    *workspace = 0;                                                                                         \
    *executor = rec_sdk::emulator::note(&function, a, b, c);                                                \
    return ACL_SUCCESS;                                                                                     \
  }                                                                                                         \
  REC_SDK_ACLNN_RUN(name)

#define REC_SDK_ACLNN_4(name, function)                                                                     \
  REC_SDK_ACLNN_EXPORT aclnn##name##GetWorkspaceSize(                                                       \
      REC_SDK_ACLNN_ARG(function, 0) a, REC_SDK_ACLNN_ARG(function, 1) b, REC_SDK_ACLNN_ARG(function, 2) c, \
      REC_SDK_ACLNN_ARG(function, 3) d, uint64_t* workspace, aclOpExecutor** executor) {                    \
    *workspace = 0;                                                                                         \
    *executor = rec_sdk::emulator::note(&function, a, b, c, d);                                             \
    return ACL_SUCCESS;                                                                                     \
  }                                                                                                         \
  REC_SDK_ACLNN_RUN(name)
