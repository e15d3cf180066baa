// Provides torch's threads to the host engine, which does not depend on torch (engine/base/parallel.h).
#include "torch_npu_ext/ops/cpu.h"

extern "C" __attribute__((visibility("default"))) void rec_sdk_run_pieces(
    int64_t count, void (*piece)(void* context, int64_t i), void* context) {
  rec_sdk::parallel_pieces(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) piece(context, i);
  });
}

extern "C" __attribute__((visibility("default"))) int64_t rec_sdk_thread_count() {
  return torch::stable::get_num_threads();
}
