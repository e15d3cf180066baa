// One engine of a core tells another that it may go on.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

// set() and wait() alternate in the source and on the engines: code that sets again must know that the other
// engine took the last one, or it may be lost and the other waits for ever. Every set is waited for before
// the kernel ends. Its id is released only where another pipe comes behind this one: else a signal lives as
// long as the kernel.
template <HardEvent kEvent>
class Signal {
 public:
  __aicore__ inline void init(TPipe* pipe) { id_ = static_cast<int32_t>(pipe->AllocEventID<kEvent>()); }
  __aicore__ inline void release(TPipe* pipe) const { pipe->ReleaseEventID<kEvent>(id_); }
  __aicore__ inline void set() const { AscendC::SetFlag<kEvent>(id_); }
  __aicore__ inline void wait() const { AscendC::WaitFlag<kEvent>(id_); }
  // Later instructions of the waiting engine come after all earlier ones of the other engine.
  __aicore__ inline void order() const {
    set();
    wait();
  }

 private:
  int32_t id_ = 0;
};

}  // namespace ascendc
}  // namespace rec_sdk
