// librec_sdk_fallback.so: replaces the aten kernels that torch_npu registers, which would call CANN's
// operators, by CPU kernels. torch_npu's kernels for allocation, copies, views and storages are kept.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdio>
#include <mutex>
#include <string>
#include <unordered_set>

#include "host_call.h"

namespace rec_sdk::emulator {
namespace {

using c10::DispatchKey;
using c10::OperatorHandle;
using torch::jit::Stack;

// The operators for which torch_npu's kernels are kept, because they work with the emulated runtime and
// libopapi.so.
const std::unordered_set<std::string> kKept = {
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::_has_compatible_shallow_copy_type",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::_unsafe_view",
    "aten::as_strided_",
    "aten::clone",
    "aten::contiguous",
    "aten::copy_",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::fill_",
    "aten::is_pinned",
    "aten::is_set_to",
    "aten::new_empty_strided",
    "aten::pin_memory",
    "aten::record_stream",
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::zero_",
};

// Composite operators that select a kernel by the device of their input and have none for NPUs. They run
// entirely on the CPU.
const std::unordered_set<std::string> kEntirelyOnHost = {
    "aten::convolution",
    "aten::convolution_backward",
};

bool is_view(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.alias_info() && !argument.alias_info()->isWrite()) return true;
  }
  return false;
}

template <DispatchKey key>
void call_kernel_of(const OperatorHandle& op, Stack* stack) {
  op.callBoxedForDispatchKey(key, *stack);
}

class QuietWarnings : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

class Installer {
 public:
  void install() {
    // Without this object, the dispatcher would warn about every replaced kernel.
    QuietWarnings quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0 || kKept.count(name.name)) continue;
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op || is_view(op->schema())) continue;
      replace_kernel(*op, name);
      replace_autograd(*op, name);
    }
  }

 private:
  void replace_kernel(const OperatorHandle& op, const c10::OperatorName& name) {
    const bool replaces = op.hasKernelForDispatchKey(DispatchKey::PrivateUse1);
    const bool implicit = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    const bool composite = implicit || op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    if (op.hasKernelForDispatchKey(DispatchKey::CPU) || kEntirelyOnHost.count(name.name)) {
      if (replaces || !composite) set<&call_on_host>(name, DispatchKey::PrivateUse1);
    } else if (replaces && implicit) {
      set<&call_kernel_of<DispatchKey::CompositeImplicitAutograd>>(name, DispatchKey::PrivateUse1);
    } else if (replaces && composite) {
      set<&call_kernel_of<DispatchKey::CompositeExplicitAutograd>>(name, DispatchKey::PrivateUse1);
    } else if (replaces && op.hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
      set<&call_on_host>(name, DispatchKey::PrivateUse1);
    }
  }

  // Replaces torch_npu's autograd kernels, because some of them call operators that exist only in CANN.
  void replace_autograd(const OperatorHandle& op, const c10::OperatorName& name) {
    if (!op.hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1)) return;
    if (op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) {
      set<&call_kernel_of<DispatchKey::CompositeImplicitAutograd>>(name, DispatchKey::AutogradPrivateUse1);
    } else if (op.hasKernelForDispatchKey(DispatchKey::Autograd)) {
      set<&call_kernel_of<DispatchKey::Autograd>>(name, DispatchKey::AutogradPrivateUse1);
    }
  }

  template <c10::BoxedKernel::BoxedKernelFunction* kernel>
  void set(const c10::OperatorName& name, DispatchKey key) {
    std::string overload = name.name.substr(std::char_traits<char>::length("aten::"));
    if (!name.overload_name.empty()) overload += "." + name.overload_name;
    library_.impl(overload.c_str(),
                  torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<kernel>()));
  }

  torch::Library library_{torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__};
};

}  // namespace
}  // namespace rec_sdk::emulator

// Installs the fallback. Returns 0, or 1 after it has printed an error. Further calls do nothing.
extern "C" __attribute__((visibility("default"))) int rec_sdk_install_fallback() {
  static std::once_flag once;
  static int failed = 0;
  std::call_once(once, [] {
    try {
      // The installer is never destroyed, because kernels may be called during exit, after static objects are
      // destroyed.
      (new rec_sdk::emulator::Installer)->install();
    } catch (const std::exception& e) {
      failed = 1;
      std::fprintf(stderr, "emulated NPU: cannot install the CPU fallback: %s\n", e.what());
    }
  });
  return failed;
}
