// Says what happened when host code touches device memory, before the fault takes its course.
#pragma once

namespace rec_sdk::emulator {

// To be called again from time to time: others may have put their handler in its place.
void install_guard();

}  // namespace rec_sdk::emulator
