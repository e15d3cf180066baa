// Runs a CUDA kernel on the host. The blocks run one after the other. The threads of a block are fibers,
// which switch only at barriers and shuffles. set_order determines which block and which ready thread runs
// next. Results that depend on this order reveal a missing barrier. A kernel that is invalid on some GPU
// throws KernelError.
//
// The machine is stricter than a GPU: all threads of a barrier or a shuffle must reach the same line of the
// source, and none of them may have ended.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

struct dim3;

namespace cuda_host {

struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Orders of blocks and threads; any other number is the seed of a random order.
constexpr uint64_t kAscending = 0, kDescending = 1;
void set_order(uint64_t order);

// Sets the name of the test, which is printed with reports of the sanitizers.
void set_title(const std::string& title);

// The following declarations are used by cuda_runtime.h.

struct Place {
  const char* file;
  int line;

  static constexpr Place caller(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// A barrier or shuffle in which a thread waits for the threads of its warp that `mask` names.
struct Call {
  const char* name;
  Place place;
  uint32_t mask;
  int source;  // lane whose value the thread gets
  uint64_t value;
};

uint64_t exchange(const Call& call);
void wait_for_block(Place place);
int lane();
// Returns the first lane of the segment of `width` lanes that contains the calling thread's lane.
int segment_start(int width, Place place);

void run(const void* kernel, const dim3& grid, const dim3& block, const std::function<void()>& call);

}  // namespace cuda_host
