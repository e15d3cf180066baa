#include "emulator/kernels/lookup_buffers.h"
#include "op_kernels/common/ascendc/blocks.h"
#include "op_kernels/common/ascendc/launch.h"
#include "op_kernels/gather_rows/ascendc.h"

void rec_sdk_launch_gather_rows(void* stream, const rec_sdk::CopyRows* a) {
  const int64_t blocks = rec_sdk::ascendc::blocks_of(*a, rec_sdk_ascendc_vector_cores(stream));
  if (blocks == 0) return;
  rec_sdk::emulator::launch_kernel(stream, "gather_rows", blocks,
                                   rec_sdk::emulator::gather_buffers(*a).list(),
                                   [a = *a] { rec_sdk::ascendc::gather_rows(a); });
}
