// Prints an explanation when host code accesses device memory, before the fault is handled as usual.
#pragma once

namespace rec_sdk::emulator {

// Must be called repeatedly, because other code may replace the handler.
void install_guard();

}  // namespace rec_sdk::emulator
