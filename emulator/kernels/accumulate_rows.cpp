#include "emulator/kernels/update_kernels.h"

void rec_sdk_launch_accumulate_rows(void* stream, const rec_sdk::AccumulateRows* a, void* workspace) {
  rec_sdk::emulator::run_accumulate_rows(rec_sdk::emulator::OnStream{stream}, *a, workspace,
                                         rec_sdk_ascendc_vector_cores(stream));
}
