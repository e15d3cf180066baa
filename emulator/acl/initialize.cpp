// The functions aclInit and aclFinalize.
#include <acl/acl.h>
#include <dlfcn.h>

#include <cstdio>
#include <mutex>
#include <string>

#include "errors.h"
#include "guard.h"
#include "scheduler.h"
#include "settings.h"

namespace rec_sdk::emulator {
namespace {

std::mutex& initialize_mutex = *new std::mutex;
bool initialized = false;

// Returns the folder of this library, with a slash at the end.
std::string own_folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr) {
    return "";
  }
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

// Installs the CPU fallback for operators. Only torch_npu needs it, so it is installed only if torch_npu is
// loaded.
void install_fallback() {
  void* torch_npu = dlopen("libtorch_npu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (torch_npu == nullptr) {
    return;
  }
  dlclose(torch_npu);
  const std::string path = own_folder() + "librec_sdk_fallback.so";
  void* library = dlopen(path.c_str(), RTLD_NOW);
  void* found = library == nullptr ? nullptr : dlsym(library, "rec_sdk_install_fallback");
  if (found == nullptr) {
    std::fprintf(stderr, "NPU emulator: operators cannot run on the CPU: %s\n", dlerror());
    return;
  }
  trace("operators that are not emulated run on the CPU: %s", path.c_str());
  reinterpret_cast<int (*)()>(found)();  // the function prints its errors itself
}

}  // namespace
}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

aclError aclInit(const char*) {
  const std::lock_guard<std::mutex> lock(initialize_mutex);
  if (initialized) {
    return fail(ACL_ERROR_REPEAT_INITIALIZE, "aclInit: called again");
  }
  initialized = true;
  trace("%d devices of %llu bytes; kernels are checked for %s, torch_npu sees %s", settings().devices,
        static_cast<unsigned long long>(settings().memory), settings().soc->name,
        settings().soc_name.c_str());
  install_guard();
  install_fallback();
  return ACL_SUCCESS;
}

aclError aclFinalize() {
  const std::lock_guard<std::mutex> lock(initialize_mutex);
  if (!initialized) {
    return fail(ACL_ERROR_UNINITIALIZE, "aclFinalize: aclInit() was not called");
  }
  initialized = false;
  wait_for(ends_of_streams(-1), kNever);
  return ACL_SUCCESS;
}
