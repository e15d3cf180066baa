// One engine of a core tells another that it may go on.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

// set() and wait() alternate in the source and on the engines: who sets again must know that the other engine
// took the last one, or it may be lost and the other waits for ever. Every set is waited for before the
// kernel ends.
template <HardEvent kEvent>
class Signal {
 public:
  __aicore__ inline void init(TPipe* pipe) { id_ = static_cast<int32_t>(pipe->AllocEventID<kEvent>()); }
  __aicore__ inline void set() const { AscendC::SetFlag<kEvent>(id_); }
  __aicore__ inline void wait() const { AscendC::WaitFlag<kEvent>(id_); }
  // What the waiting engine is told from here on comes after all that the other one was told before.
  __aicore__ inline void order() const {
    set();
    wait();
  }

 private:
  int32_t id_ = 0;
};

}  // namespace ascendc
}  // namespace rec_sdk
