#include "op_kernels/common/ascendc/runtime.h"

#include "emulator/ascendc/launch.h"
#include "op_kernels/common/ascendc/launch.h"

int64_t rec_sdk_ascendc_vector_cores(void* stream) { return rec_sdk::ascendc::vector_cores(stream); }
int32_t rec_sdk_ascendc_take_error() { return rec_sdk::ascendc::take_error(); }
void rec_sdk_launch_on_no_cores(void* stream) {
  rec_sdk::emulator::launch_kernel(stream, "nothing", 0, {}, [] {});
}
