// Compiles all kernels as in the host pass of bisheng, which parses them and instantiates them for every data
// type of weights. The command line includes each op_kernels/*/ascendc.h.
#include "op_kernels/update_rows/ascendc_launch.h"

namespace {

struct Instantiate {
  template <class Optimizer, class Weights>
  void launch() const {
    AscendC::TPipe pipe;
    rec_sdk::ascendc::update_rows<Optimizer, Weights>(&pipe, {}, {});
  }
};

}  // namespace

void instantiate(const char* optimizer, rec_sdk::DType weights) {
  rec_sdk::ascendc::launch_by_name(Instantiate{}, optimizer, weights, rec_sdk::REC_SDK_ISA::Optimizers{});
}
