// Runs AscendC kernels on the host: once per block, one block after the other, each in its own fiber. Every
// instruction is checked against the rules of the hardware; the first violation ends the launch.
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

// A range of global memory that a kernel may access. The kernel uses the address `device`; the bytes are at
// `host` (null: also at `device`).
struct Buffer {
  const char* name;
  const void* device;
  uint64_t bytes;
  Access access;
  void* host = nullptr;
};

// Its what() names the kernel, the core, the engine, the instruction and the rule with its numbers.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs body() once per block and returns when all blocks are done.
void run_kernel(const char* kernel, int64_t blocks, const std::vector<Buffer>& buffers,
                const std::function<void()>& body);

// Runs a kernel in the order of a stream (null: the default one). `host` of the buffers is determined from
// `device`. As on a chip, a failed launch is reported only by the runtime's last error.
void launch_kernel(void* stream, const char* kernel, int64_t blocks, std::vector<Buffer> buffers,
                   std::function<void()> body);
// Returns the runtime's last error on this thread (an aclError) without clearing it.
int launch_error();

}  // namespace rec_sdk::emulator
