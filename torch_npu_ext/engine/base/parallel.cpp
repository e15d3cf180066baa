#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {
namespace {

ParallelRunner runner = nullptr;
int64_t (*count_threads)() = nullptr;
int64_t from_lookups = kParallelLookups;

}  // namespace

void set_parallel_runner(ParallelRunner provided, int64_t (*threads)(), int64_t from) {
  runner = provided;
  count_threads = threads;
  from_lookups = from;
}

bool worth_threads(int64_t lookups) { return lookups >= from_lookups; }

int64_t parallel_threads() { return runner != nullptr ? count_threads() : 1; }

void run_pieces(int64_t count, void (*piece)(void* context, int64_t i), void* context) {
  if (runner != nullptr && count > 1) {
    runner(count, piece, context);
    return;
  }
  for (int64_t i = 0; i < count; ++i) piece(context, i);
}

}  // namespace rec_sdk
