// C functions that return and select the instruction set of the CPU kernels. They are not operators, because
// they have no tensor arguments and concern only the CPU.
#include "op_kernels/common/cpu_kernels.h"

extern "C" __attribute__((visibility("default"))) const char* rec_sdk_cpu_isa() {
  return rec_sdk::cpu_kernels().isa;
}

extern "C" __attribute__((visibility("default"))) int rec_sdk_select_cpu_isa(const char* name) {
  return rec_sdk::select_cpu_isa(name) ? 1 : 0;
}
