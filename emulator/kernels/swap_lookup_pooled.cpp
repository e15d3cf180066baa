#include "emulator/kernels/lookup_buffers.h"
#include "op_kernels/common/ascendc/blocks.h"
#include "op_kernels/common/ascendc/launch.h"
#include "op_kernels/swap_lookup_pooled/ascendc.h"

void rec_sdk_launch_swap_lookup_pooled(void* stream, const rec_sdk::SwapLookupPooled* a) {
  const int64_t blocks = rec_sdk::ascendc::blocks_of(*a, rec_sdk_ascendc_vector_cores(stream));
  if (blocks == 0) return;
  rec_sdk::emulator::launch_kernel(stream, "swap_lookup_pooled", blocks,
                                   rec_sdk::emulator::buffers_of(*a).list(),
                                   [a = *a] { rec_sdk::ascendc::swap_lookup_pooled(a); });
}
