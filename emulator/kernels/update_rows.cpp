#include "emulator/kernels/update_kernels.h"

int64_t rec_sdk_segments_workspace(const rec_sdk::Segments* segments) {
  return rec_sdk::ascendc::workspace_bytes(*segments);
}

void rec_sdk_launch_update_rows(void* stream, const rec_sdk::UpdateRows* a, const char* optimizer,
                                void* workspace) {
  rec_sdk::emulator::run_update_rows(rec_sdk::emulator::OnStream{stream}, *a, optimizer, workspace,
                                     rec_sdk_ascendc_vector_cores(stream));
}
