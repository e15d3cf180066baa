#include "host_call.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "host_view.h"
#include "random.h"

namespace rec_sdk::emulator {
namespace {

using at::Tensor;
using c10::IValue;
using TensorList = c10::List<Tensor>;
using OptionalTensorList = c10::List<std::optional<Tensor>>;

// The names of arguments that operators read on the host, even if their other tensors are on a device.
constexpr const char* kHostArguments[] = {"indices",        "lengths",     "input_lengths",
                                          "target_lengths", "batch_sizes", "tensor_indices_or_sections"};

void check_kind(const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided && !tensor.is_quantized(),
                              "emulated NPU: ", tensor.is_quantized() ? "quantized " : "", tensor.layout(),
                              " tensors are not supported");
}

Tensor view_of(const Tensor& tensor) {
  check_kind(tensor);
  Tensor view = host_view(tensor.const_data_ptr(), tensor.sizes(), tensor.strides(), tensor.scalar_type());
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op),
        schema_(op.schema()),
        stack_(stack),
        first_(stack->size() - schema_.arguments().size()),
        device_(target_device()) {}

  void run() {
    const c10::DeviceGuard guard(device_);
    wait_for_stream();
    for (size_t i = 0; i < schema_.arguments().size(); ++i) replace(i);
    for (const Operand& operand : operands_) check_overlap(operand);
    call_kernel();
    finish_outputs();
    for (size_t i = stack_->size() - schema_.returns().size(); i < stack_->size(); ++i) {
      (*stack_)[i] = to_device(std::move((*stack_)[i]));
    }
  }

 private:
  // An argument that is an NPU tensor, and the host tensor that the CPU kernel gets instead.
  struct Operand {
    Tensor device, host;
    bool is_output;  // whether the operator writes all of it and may resize it
  };

  IValue& argument(size_t i) { return (*stack_)[first_ + i]; }

  // Waits for the stream, because work on it may still use the memory that the host is about to access. This
  // is also possible for newly allocated memory, if another thread freed it after it had queued a kernel that
  // uses it.
  void wait_for_stream() {
    const c10::impl::VirtualGuardImpl device(device_.type());
    device.synchronizeStream(device.getStream(device_));
  }

  // Checks that an output does not overlap an input. The CPU kernel cannot detect this, because it writes the
  // output to other memory.
  void check_overlap(const Operand& output) {
    if (!output.is_output) return;
    for (const Operand& other : operands_) {
      if (&other != &output) at::assert_no_partial_overlap(output.device, other.device);
    }
  }

  // Calls visit(tensor, argument) for every defined tensor in the arguments of the call.
  template <class Visit>
  void each_tensor(Visit visit) {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      const IValue& value = argument(i);
      const c10::Argument& declared = schema_.arguments()[i];
      const auto visit_defined = [&](const Tensor& tensor) {
        if (tensor.defined()) visit(tensor, declared);
      };
      if (value.isTensor()) {
        visit_defined(value.toTensor());
      } else if (value.isTensorList()) {
        for (const Tensor& tensor : value.toTensorVector()) visit_defined(tensor);
      } else if (value.isOptionalTensorList()) {
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
          if (tensor) visit_defined(*tensor);
        }
      }
    }
  }

  c10::Device target_device() {
    std::optional<c10::Device> device;
    each_tensor([&](const Tensor& tensor, const c10::Argument&) {
      if (tensor.is_privateuseone() && !device) device = tensor.device();
    });
    for (size_t i = 0; i < schema_.arguments().size() && !device; ++i) {
      if (argument(i).isDevice() && argument(i).toDevice().is_privateuseone())
        device = argument(i).toDevice();
    }
    TORCH_INTERNAL_ASSERT(device, "emulated NPU: ", schema_, " was called without an NPU tensor");
    if (!device->has_index()) device = c10::impl::VirtualGuardImpl(device->type()).getDevice();
    each_tensor(
        [&](const Tensor& tensor, const c10::Argument& declared) { check(tensor, declared, *device); });
    return *device;
  }

  void check(const Tensor& tensor, const c10::Argument& declared, c10::Device device) {
    if (tensor.device() == device) return;
    const bool written = declared.alias_info() && declared.alias_info()->isWrite();
    const bool from_host =
        tensor.is_cpu() && !written &&
        (tensor.dim() == 0 || std::find(std::begin(kHostArguments), std::end(kHostArguments),
                                        declared.name()) != std::end(kHostArguments));
    TORCH_CHECK(from_host, "Expected all tensors to be on the same device, but found at least two devices, ",
                device, " and ", tensor.device(), "! (argument ", declared.name(), " of ", schema_.name(),
                ")");
  }

  void replace(size_t i) {
    IValue& value = argument(i);
    const c10::Argument& declared = schema_.arguments()[i];
    if (value.isTensor()) {
      value = host_operand(value.toTensor(), declared);
    } else if (value.isTensorList()) {
      TensorList list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(host_operand(tensor, declared));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      OptionalTensorList list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(host_operand(*tensor, declared)) : std::nullopt);
      }
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (is_generator(declared)) {
      value = host_generator(value.isNone() ? at::Generator() : value.toGenerator(), device_);
      has_generator_ = true;
    }
  }

  static bool is_generator(const c10::Argument& declared) {
    const c10::Type& type = *declared.type();
    if (type.kind() == c10::TypeKind::GeneratorType) return true;
    const auto optional = type.cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  Tensor host_operand(const Tensor& tensor, const c10::Argument& declared) {
    if (!tensor.defined() || tensor.is_cpu()) return tensor;
    for (const Operand& known : operands_) {
      if (known.device.is_same(tensor)) return known.host;
    }
    // An output gets a new host tensor, because a view of device memory cannot be resized. Its former
    // contents are not needed.
    const bool is_output = declared.is_out();
    Tensor host =
        is_output ? at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type())) : view_of(tensor);
    operands_.push_back({tensor, host, is_output});
    return host;
  }

  void call_kernel() {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto call = [this] { op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_); };
    if (!has_generator_ && op_.hasTag(at::Tag::nondeterministic_seeded)) {
      with_host_generator(device_, call);
    } else {
      call();
    }
  }

  void finish_outputs() {
    for (const Operand& operand : operands_) {
      if (operand.is_output) {
        at::native::resize_output(operand.device, operand.host.sizes());
        wait_for_stream();
        view_of(operand.device).copy_(operand.host);
      } else {
        TORCH_CHECK_NOT_IMPLEMENTED(operand.host.sizes() == operand.device.sizes() &&
                                        operand.host.strides() == operand.device.strides(),
                                    "emulated NPU: ", schema_.name(),
                                    " changes the shape of its operand; that is not supported");
      }
    }
  }

  IValue to_device(IValue value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (value.isTensorList()) {
      TensorList list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
      return list;
    }
    return value;
  }

  Tensor to_device(const Tensor& host) {
    if (!host.defined()) return host;
    for (const Operand& operand : operands_) {
      if (operand.host.is_same(host)) return operand.device;
    }
    check_kind(host);
    const at::TensorOptions options = at::TensorOptions().dtype(host.scalar_type()).device(device_);
    Tensor result = host.is_non_overlapping_and_dense()
                        ? at::empty_strided(host.sizes(), host.strides(), options)
                        : at::empty(host.sizes(), options);
    wait_for_stream();
    view_of(result).copy_(host);
    return result;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  size_t first_;  // index of the first argument on the stack
  c10::Device device_;
  bool has_generator_ = false;
  std::vector<Operand> operands_;
};

}  // namespace

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { HostCall(op, stack).run(); }

}  // namespace rec_sdk::emulator
