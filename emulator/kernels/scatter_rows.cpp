#include "emulator/kernels/lookup_buffers.h"
#include "op_kernels/common/ascendc/blocks.h"
#include "op_kernels/common/ascendc/launch.h"
#include "op_kernels/scatter_rows/ascendc.h"

void rec_sdk_launch_scatter_rows(void* stream, const rec_sdk::CopyRows* a) {
  const int64_t blocks = rec_sdk::ascendc::blocks_of(*a, rec_sdk_ascendc_vector_cores(stream));
  if (blocks == 0) return;
  rec_sdk::emulator::launch_kernel(stream, "scatter_rows", blocks,
                                   rec_sdk::emulator::scatter_buffers(*a).list(),
                                   [a = *a] { rec_sdk::ascendc::scatter_rows(a); });
}
