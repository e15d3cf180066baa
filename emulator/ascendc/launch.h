// Launches of AscendC kernels on the host. A kernel runs once per block, one block after another, each in a
// fiber. Every instruction is checked against the rules of the hardware, and the first violation ends the
// launch.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/ascendc/soc.h"

namespace rec_sdk::emulator {

enum class Access {
  kRead,
  kWrite,  // an output that the kernel must write completely; it is filled with 0xFF (NaN) before the launch
  kReadWrite,
};

// A range of global memory that a kernel may access. The kernel uses the address `device`. The contents are
// at the address `host`; if that is null, they are at `device`.
struct Buffer {
  const char* name;
  const void* device;
  uint64_t bytes;
  Access access;
  void* host = nullptr;
};

// A violated rule. what() names the kernel, the core, the engine, the instruction and the rule with its
// numbers.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs body() once per block, and returns when all blocks are done.
void run_kernel(const char* kernel, int64_t blocks, const std::vector<Buffer>& buffers,
                const std::function<void()>& body);

// Puts a launch on a stream; null means the default stream. Member `host` of the buffers is set from
// `device`. As on a chip, a failed launch is reported only as the runtime's last error.
void launch_kernel(void* stream, const char* kernel, int64_t blocks, std::vector<Buffer> buffers,
                   std::function<void()> body);
// Returns the runtime's last error on this thread, an aclError, and does not clear it.
int launch_error();

}  // namespace rec_sdk::emulator
