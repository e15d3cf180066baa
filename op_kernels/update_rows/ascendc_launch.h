// Host side of update_rows and accumulate_rows, which the launchers for an NPU and for the emulator share.
#pragma once

#include <cstring>

#include "op_kernels/common/ascendc/launch.h"
#include "op_kernels/common/optimizers.h"
#include "op_kernels/update_rows/ascendc.h"
#include "op_kernels/update_rows/ascendc_plan.h"

namespace rec_sdk {
namespace ascendc {

// Launches the kernels that run before the update of rows. They write the table of gradients, if there are
// several, and sum the chunks of hot rows, if there are any. Changes `segments` for the update, and returns
// the workspace of the chunk sums. The caller must not launch the update if a launch failed.
HotWorkspace launch_preparation(void* stream, Segments* segments, void* workspace);

// Calls launcher.launch<Optimizer, Weights>(); Weights is a type of record_tile.h.
template <class Optimizer, class Launcher>
void launch_optimizer(const Launcher& launcher, DType weight_dtype) {
  switch (weight_dtype) {
    case DType::kFloat32:
      return launcher.template launch<Optimizer, FloatWeights>();
    case DType::kFloat16:
      return launcher.template launch<Optimizer, HalfWeights>();
    case DType::kBFloat16:
      return launcher.template launch<Optimizer, BFloat16Weights>();
  }
}

template <class Launcher, class... Optimizer>
void launch_by_name(const Launcher& launcher, const char* name, DType weight_dtype,
                    REC_SDK_ISA::OptimizerList<Optimizer...>) {
  ((std::strcmp(name, Optimizer::name()) == 0 ? launch_optimizer<Optimizer>(launcher, weight_dtype) : void()),
   ...);
}

}  // namespace ascendc
}  // namespace rec_sdk
