// Runs a kernel on the host: the blocks one after the other, the threads of a block as fibers that switch
// only at barriers and shuffles. set_order chooses the next block and the next ready thread; no result may
// depend on it, so that a missing barrier is found. A kernel that is invalid on some GPU throws KernelError.
//
// Stricter than a GPU: all threads of a barrier or a shuffle must reach the same line of the source, and none
// of them may have ended.
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

// The name of the test, for the reports of the sanitizers.
void set_title(const std::string& title);

// For cuda_runtime.h.

struct Place {
  const char* file;
  int line;

  static constexpr Place caller(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// The state of a thread: it waits for the threads of its warp that `mask` names.
struct Call {
  const char* name;
  Place place;
  uint32_t mask;
  int source;  // lane whose value it gets
  uint64_t value;
};

uint64_t exchange(const Call& call);
void wait_for_block(Place place);
int lane();
// The first lane of the segment of `width` lanes that the caller is in.
int segment_start(int width, Place place);

void run(const void* kernel, const dim3& grid, const dim3& block, const std::function<void()>& call);

}  // namespace cuda_host
