// The precision with which threads wake from a sleep (timer slack).
#pragma once

namespace rec_sdk::emulator {

// After start_drowsy_threads(), threads that the calling thread creates before its next call about work on a
// stream sleep for at least a millisecond.
//
// torch_npu starts such a thread after it created a device's first stream; the thread checks every
// microsecond whether there is something to release. Without this it would use a fifth of a core in every
// process.
void start_drowsy_threads();
void start_alert_threads();

}  // namespace rec_sdk::emulator
