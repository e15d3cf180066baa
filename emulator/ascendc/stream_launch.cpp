// Kernel launches in the order of a stream of the emulated runtime.
#include <acl/acl.h>

#include <utility>

#include "emulator/acl/emulator.h"
#include "emulator/ascendc/launch.h"

namespace rec_sdk::emulator {
namespace {

void find_host_memory(const char* kernel, std::vector<Buffer>& buffers) {
  for (Buffer& buffer : buffers) {
    if (buffer.device == nullptr || buffer.bytes == 0) {
      continue;
    }
    buffer.host = rec_sdk_emulator_host_address(buffer.device, buffer.bytes);
    if (buffer.host == nullptr) {
      throw KernelError(std::string("kernel '") + kernel + "': its argument '" + buffer.name + "', " +
                        std::to_string(buffer.bytes) +
                        " bytes, is not inside one allocation of device memory");
    }
  }
}

}  // namespace

void launch_kernel(void* stream, const char* kernel, int64_t blocks, std::vector<Buffer> buffers,
                   std::function<void()> body) {
  if (rec_sdk_emulator_refuses(kernel, blocks)) {
    return;
  }
  on_stream(stream, kernel, [kernel, blocks, buffers = std::move(buffers), body = std::move(body)]() mutable {
    find_host_memory(kernel, buffers);
    run_kernel(kernel, blocks, buffers, body);
  });
}

int launch_error() { return aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL); }

}  // namespace rec_sdk::emulator
