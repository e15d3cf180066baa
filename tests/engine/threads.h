// A parallel runner that starts one thread per piece, beginning with the last piece.
#pragma once

#include <thread>
#include <vector>

#include "torch_npu_ext/engine/base/parallel.h"

namespace rec_sdk {

inline int64_t pieces_run = 0;

inline void run_on_threads(int64_t count, void (*piece)(void* context, int64_t i), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = count; i-- > 0;) threads.emplace_back(piece, context, i);
  for (std::thread& thread : threads) thread.join();
  pieces_run += count;
}

inline int64_t eight_threads() { return 8; }

}  // namespace rec_sdk
