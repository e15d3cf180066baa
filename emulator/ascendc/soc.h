// The chip whose limits and rules are enforced for the kernels of this process.
#pragma once

#include "emulator/settings.h"

namespace rec_sdk::emulator {

inline const Soc& soc() { return *settings().soc; }

}  // namespace rec_sdk::emulator
