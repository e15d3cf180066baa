#include "torch_npu_ext/emulator/ascendc/soc.h"

#include <stdexcept>
#include <string>

#include "torch_npu_ext/emulator/settings.h"

namespace rec_sdk::emulator {
namespace {

// The system keeps 256 bytes, and 8 KB more unless a kernel is compiled without that reserve.
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

const Soc& find_soc() {
  const std::string name = settings().soc;
  std::string known;
  for (const Soc& candidate : kSocs) {
    if (candidate.arch != REC_SDK_ASCENDC_ARCH) {
      continue;
    }
    if (name == candidate.name) {
      return candidate;
    }
    known += std::string(known.empty() ? "" : ", ") + candidate.name;
  }
  throw std::invalid_argument("REC_SDK_EMULATED_SOC is \"" + name +
                              "\"; the kernels were compiled for arch " +
                              std::to_string(REC_SDK_ASCENDC_ARCH) + ", whose chips are " + known);
}

}  // namespace

const Soc& soc() {
  static const Soc& chosen = find_soc();
  return chosen;
}

}  // namespace rec_sdk::emulator
