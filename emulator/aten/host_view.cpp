#include "host_view.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "../acl/emulator.h"

namespace rec_sdk::emulator {
namespace {

// Returns the number of elements in memory from the first to the last element of a tensor with these strides;
// 0 for an empty tensor.
int64_t extent(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t elements = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    elements += (sizes[i] - 1) * strides[i];
  }
  return elements;
}

}  // namespace

at::Tensor host_view(const void* device_address, at::IntArrayRef sizes, at::IntArrayRef strides,
                     at::ScalarType type) {
  const auto options = at::TensorOptions().dtype(type);
  const uint64_t bytes = extent(sizes, strides) * c10::elementSize(type);
  if (bytes == 0) return at::empty_strided(sizes, strides, options);
  void* host = rec_sdk_emulator_host_address(device_address, bytes);
  TORCH_CHECK(host, "emulated NPU: ", bytes, " bytes at ", device_address,
              " are not inside one live allocation of device memory");
  return at::from_blob(host, sizes, strides, options);
}

}  // namespace rec_sdk::emulator
