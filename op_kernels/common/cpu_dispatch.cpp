// Selects the instruction set of the CPU kernels once, when the library is loaded.
#include <atomic>
#include <cstring>

#include "op_kernels/common/cpu_kernels.h"

namespace rec_sdk {

namespace baseline {
extern const CpuKernels kKernels;
}
#ifdef REC_SDK_HAS_X86_LEVELS
namespace x86_64_v3 {
extern const CpuKernels kKernels;
}
namespace x86_64_v4 {
extern const CpuKernels kKernels;
}
#endif

namespace {

struct Candidate {
  const CpuKernels* kernels;
  bool (*supported)();
};

#ifdef REC_SDK_HAS_X86_LEVELS
bool has_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}

bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

// The instruction sets, the fastest first.
const Candidate kCandidates[] = {
#ifdef REC_SDK_HAS_X86_LEVELS
    {&x86_64_v4::kKernels, has_v4},
    {&x86_64_v3::kKernels, has_v3},
#endif
    {&baseline::kKernels, [] { return true; }},
};

const CpuKernels* find(const char* name) {
  for (const Candidate& candidate : kCandidates) {
    const bool wanted = *name == '\0' || std::strcmp(name, candidate.kernels->isa) == 0;
    if (wanted && candidate.supported()) return candidate.kernels;
  }
  return nullptr;
}

std::atomic<const CpuKernels*>& selected() {
  static std::atomic<const CpuKernels*> kernels{find("")};
  return kernels;
}

}  // namespace

const CpuKernels& cpu_kernels() { return *selected().load(std::memory_order_relaxed); }

bool select_cpu_isa(const char* name) {
  const CpuKernels* kernels = find(name);
  if (kernels != nullptr) selected().store(kernels, std::memory_order_relaxed);
  return kernels != nullptr;
}

}  // namespace rec_sdk
