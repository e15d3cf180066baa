// Runs AscendC kernels on the host: once per block, one block after the other, each in its own fiber. Every
// instruction is checked against the rules of the hardware; the first one broken ends the launch.
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
  kWrite,  // an output that the kernel must write as a whole: filled with 0xFF (NaN) before it runs
  kReadWrite,
};

// A range of global memory that a kernel may touch. A kernel knows it by `device`; the bytes are at `host`
// (null: at `device` too).
struct Buffer {
  const char* name;
  const void* device;
  uint64_t bytes;
  Access access;
  void* host = nullptr;
};

// what() names the kernel, the core, the engine, the instruction and the rule, with its numbers.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs body() once per block and returns when all are done.
void run_kernel(const char* kernel, int64_t blocks, const std::vector<Buffer>& buffers,
                const std::function<void()>& body);

// The same in the order of a stream (null: the default one). `host` of the buffers is found from `device`. As
// on a chip, a launch that fails is known by the runtime's last error only.
void launch_kernel(void* stream, const char* kernel, int64_t blocks, std::vector<Buffer> buffers,
                   std::function<void()> body);
// The runtime's last error on this thread (an aclError), which stays.
int launch_error();

}  // namespace rec_sdk::emulator
