#include "op_kernels/common/ascendc/launch.h"
#include "torch_npu_ext/emulator/ascendc/soc.h"

int64_t rec_sdk_ascendc_vector_cores() { return rec_sdk::emulator::soc().vector_cores; }
