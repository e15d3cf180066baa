// A signal by which one engine of a core lets another one continue.
#pragma once

#include "op_kernels/common/ascendc/memory.h"

namespace rec_sdk {
namespace ascendc {

// set() and wait() must alternate in the source and on the engines: code that sets again must ensure that the
// other engine consumed the last signal; otherwise it may be lost, and the other engine waits forever. Every
// signal must be waited for before the kernel ends. Its event id is released only if the kernel creates
// another pipe after this one; otherwise a signal exists as long as the kernel.
template <HardEvent kEvent>
class Signal {
 public:
  __aicore__ inline void init(TPipe* pipe) { id_ = static_cast<int32_t>(pipe->AllocEventID<kEvent>()); }
  __aicore__ inline void release(TPipe* pipe) const { pipe->ReleaseEventID<kEvent>(id_); }
  __aicore__ inline void set() const { AscendC::SetFlag<kEvent>(id_); }
  __aicore__ inline void wait() const { AscendC::WaitFlag<kEvent>(id_); }
  // Orders later instructions of the waiting engine after all earlier ones of the other engine.
  __aicore__ inline void order() const {
    set();
    wait();
  }

 private:
  int32_t id_ = 0;
};

}  // namespace ascendc
}  // namespace rec_sdk
