// Timer slack: how much later than requested the system may wake a sleeping thread.
#pragma once

namespace rec_sdk::emulator {

// After start_drowsy_threads(), threads that the calling thread creates get a timer slack of a millisecond,
// so their sleeps may take that much longer. start_alert_threads() ends this.
//
// The emulator uses this for a thread that torch_npu creates after a device's first stream. That thread
// checks every microsecond whether it can release something, and would take a fifth of a core in every
// process.
void start_drowsy_threads();
void start_alert_threads();

}  // namespace rec_sdk::emulator
