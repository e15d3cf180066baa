// A handler of segmentation faults: if host code has accessed device memory, it prints an explanation before
// the fault is handled as usual.
#pragma once

namespace rec_sdk::emulator {

// Installs the handler. Must be called repeatedly, because other code may install its own handler later.
void install_guard();

}  // namespace rec_sdk::emulator
