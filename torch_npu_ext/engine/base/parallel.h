// Parallel execution on threads that the program provides; in Python these are torch's threads.
#pragma once

#include <cstdint>

namespace rec_sdk {

// Calls piece(context, i) for every i in [0, count), on any threads, and returns when all calls have
// returned.
using ParallelRunner = void (*)(int64_t count, void (*piece)(void* context, int64_t i), void* context);

// The number of lookups of a batch from which several threads are faster than one.
constexpr int64_t kParallelLookups = 8192;

// Sets the runner of all engines; null means one thread. `threads` returns the current number of threads.
// Must not be called while an engine is in use.
void set_parallel_runner(ParallelRunner runner, int64_t (*threads)(),
                         int64_t from_lookups = kParallelLookups);

void run_pieces(int64_t count, void (*piece)(void* context, int64_t i), void* context);

// Calls work(i) for every i in [0, count). It must not throw, and results must not depend on the order.
template <class Work>
void run_pieces(int64_t count, const Work& work) {
  static_assert(noexcept(work(int64_t{0})), "an exception must not leave a thread of the runner");
  const auto piece = [](void* context, int64_t i) { (*static_cast<const Work*>(context))(i); };
  run_pieces(count, piece, const_cast<Work*>(&work));
}

bool worth_threads(int64_t lookups);
int64_t parallel_threads();

// Calls work(i) for all parts, on several threads if the work costs as much as `lookups` lookups and that is
// worth it.
template <class Work>
void for_each_part(int64_t parts, int64_t lookups, const Work& work) {
  if (worth_threads(lookups)) {
    run_pieces(parts, work);
  } else {
    for (int64_t i = 0; i < parts; ++i) work(i);
  }
}

}  // namespace rec_sdk
