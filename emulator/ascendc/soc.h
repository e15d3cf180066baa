// The chip whose limits the kernels of this process are held to.
#pragma once

#include "emulator/settings.h"

namespace rec_sdk::emulator {

inline const Soc& soc() { return *settings().soc; }

}  // namespace rec_sdk::emulator
