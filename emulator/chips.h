// The chips whose limits can be enforced for emulated kernels.
#pragma once

#include <cstdint>

// The generation of chips that the kernels are compiled for; see REC_SDK_ASCENDC_ARCH in CMakeLists.txt.
#ifndef REC_SDK_ASCENDC_ARCH
#define REC_SDK_ASCENDC_ARCH 2201
#endif

namespace rec_sdk::emulator {

struct Soc {
  const char* name;
  int arch;               // the number in CMAKE_ASC_ARCHITECTURES: dav-<arch>
  int64_t vector_cores;   // maximum number of blocks that can wait for each other
  int64_t ub_bytes;       // bytes of a core's unified buffer, as the platform reports them
  int64_t ub_free_bytes;  // bytes of the unified buffer that a kernel can use
};

// The system reserves 256 bytes of the unified buffer, and 8 KB more unless a kernel is compiled without that
// reserve.
constexpr int64_t kUb2201 = 192 * 1024, kFree2201 = kUb2201 - 256 - 8 * 1024;
constexpr int64_t kUb3510 = 248 * 1024;

constexpr Soc kSocs[] = {
    {"Ascend910B1", 2201, 48, kUb2201, kFree2201},    {"Ascend910B2", 2201, 48, kUb2201, kFree2201},
    {"Ascend910B2C", 2201, 48, kUb2201, kFree2201},   {"Ascend910B3", 2201, 40, kUb2201, kFree2201},
    {"Ascend910B4", 2201, 40, kUb2201, kFree2201},    {"Ascend910B4-1", 2201, 40, kUb2201, kFree2201},
    {"Ascend910_9381", 2201, 48, kUb2201, kFree2201}, {"Ascend910_9382", 2201, 48, kUb2201, kFree2201},
    {"Ascend910_9391", 2201, 48, kUb2201, kFree2201}, {"Ascend910_9392", 2201, 48, kUb2201, kFree2201},
    {"Ascend910_9362", 2201, 40, kUb2201, kFree2201}, {"Ascend910_9363", 2201, 40, kUb2201, kFree2201},
    {"Ascend910_9372", 2201, 40, kUb2201, kFree2201}, {"Ascend950PR_9579", 3510, 56, kUb3510, kUb3510},
    {"Ascend950PR_9589", 3510, 64, kUb3510, kUb3510}, {"Ascend950PR_9599", 3510, 72, kUb3510, kUb3510},
};

}  // namespace rec_sdk::emulator
