// How exactly threads wake from a sleep.
#pragma once

namespace rec_sdk::emulator {

// Threads that this thread starts before its next call about work on a stream sleep for a millisecond at
// least.
//
// torch_npu starts one after it created a device's first stream, and that one looks every microsecond whether
// there is something to release: without this, a fifth of a core in every process, for as long as it lives.
void start_drowsy_threads();
void start_alert_threads();

}  // namespace rec_sdk::emulator
