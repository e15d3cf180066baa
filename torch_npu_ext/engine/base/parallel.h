// Pieces of work side by side, on threads that the program provides: torch's, in Python.
#pragma once

#include <cstdint>

namespace rec_sdk {

// Calls piece(context, i) for every i in [0, count), on any threads, and returns when all are done.
using ParallelRunner = void (*)(int64_t count, void (*piece)(void* context, int64_t i), void* context);

// Lookups of a batch from which on threads are worth waking up.
constexpr int64_t kParallelLookups = 8192;

// For all engines; null: one piece after the other. `threads` says how many there are at the moment. Not
// while an engine is at work.
void set_parallel_runner(ParallelRunner runner, int64_t (*threads)(),
                         int64_t from_lookups = kParallelLookups);

void run_pieces(int64_t count, void (*piece)(void* context, int64_t i), void* context);

// work(i) for every i in [0, count); it must not throw, and results must not depend on the order.
template <class Work>
void run_pieces(int64_t count, const Work& work) {
  static_assert(noexcept(work(int64_t{0})), "an exception cannot leave a thread of others");
  const auto piece = [](void* context, int64_t i) { (*static_cast<const Work*>(context))(i); };
  run_pieces(count, piece, const_cast<Work*>(&work));
}

bool worth_threads(int64_t lookups);
int64_t parallel_threads();

// work(i) for the parts of what costs as much as so many lookups, side by side where that is much.
template <class Work>
void for_each_part(int64_t parts, int64_t lookups, const Work& work) {
  if (worth_threads(lookups)) {
    run_pieces(parts, work);
  } else {
    for (int64_t i = 0; i < parts; ++i) work(i);
  }
}

}  // namespace rec_sdk
