// The chips whose limits the emulated kernels are held to.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

struct Soc {
  const char* name;
  int arch;               // as in CMAKE_ASC_ARCHITECTURES: dav-<arch>
  int64_t vector_cores;   // the most blocks that can wait for each other
  int64_t ub_bytes;       // unified buffer of a core, as the platform reports it
  int64_t ub_free_bytes;  // what the system leaves of it to a kernel
};

// REC_SDK_EMULATED_SOC; Ascend910B1 unless set. Throws std::invalid_argument for any other than the chips
// that the kernels were compiled for.
const Soc& soc();

}  // namespace rec_sdk::emulator
