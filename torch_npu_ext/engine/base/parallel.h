// Parallel execution on threads that the caller provides; in Python these are the threads of torch.
#pragma once

#include <cstdint>

namespace rec_sdk {

// A function that calls piece(context, i) for every i in [0, count), on any threads, and returns when all
// calls have returned.
using ParallelRunner = void (*)(int64_t count, void (*piece)(void* context, int64_t i), void* context);

// The size of a batch, in lookups, from which planning is faster on several threads than on one.
constexpr int64_t kParallelLookups = 8192;

// Sets the function that runs parallel work for all engines; with null, work runs on the calling thread.
// `threads` returns the current number of threads. Must not be called while an engine is in use.
void set_parallel_runner(ParallelRunner runner, int64_t (*threads)(),
                         int64_t from_lookups = kParallelLookups);

void run_pieces(int64_t count, void (*piece)(void* context, int64_t i), void* context);

// Calls work(i) for every i in [0, count), on several threads. `work` must not throw, and its results must
// not depend on the order of the calls.
template <class Work>
void run_pieces(int64_t count, const Work& work) {
  static_assert(noexcept(work(int64_t{0})), "an exception must not leave a thread of the runner");
  const auto piece = [](void* context, int64_t i) { (*static_cast<const Work*>(context))(i); };
  run_pieces(count, piece, const_cast<Work*>(&work));
}

bool worth_threads(int64_t lookups);
int64_t parallel_threads();

// Calls work(i) for every i in [0, parts). `lookups` is the total cost of the work, in lookups of a batch; if
// it is high enough, several threads are used.
template <class Work>
void for_each_part(int64_t parts, int64_t lookups, const Work& work) {
  if (worth_threads(lookups)) {
    run_pieces(parts, work);
  } else {
    for (int64_t i = 0; i < parts; ++i) work(i);
  }
}

}  // namespace rec_sdk
