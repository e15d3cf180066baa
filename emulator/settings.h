// The environment variables of the emulated NPU, except HCCL_CONNECT_TIMEOUT and HCCL_EXEC_TIMEOUT of CANN,
// which hccl/hccl.cpp reads. They are read once, when the emulator is first used. An invalid value ends the
// process with a message, because a test run with wrong settings would be misleading.
//
// variable (REC_SDK_EMULATED_...), default, meaning:
//
// DEVICES   2                 number of devices, 1 to 64
// MEMORY    16G               memory of each device, in bytes or with K, M or G (powers of 1024); host memory
//                             is used only for pages that are accessed
// SOC       Ascend910B1       the chip whose rules and sizes are enforced: one of the chips in chips.h that
//                             the kernels are compiled for
// SOC_NAME  Ascend950PR_9589  the chip name that torch_npu gets; with an Ascend910B name, torch_npu uses the
//                             graph engine and converts float64 to float32
// SEED      0                 seed of the order in which the cores of a kernel run
// STREAMS   eager             when streams run: immediately ("eager"), only when the host needs their results
//                             ("late"), or some at each call ("random:SEED"); see acl/scheduler.h
// ENGINES   eager             when the engines of a core execute instructions: immediately ("eager"), only
//                             when something must wait for them ("late"), or at random ("random:SEED")
// TRACE     0                 1 prints every call of the runtime to stderr
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "chips.h"

namespace rec_sdk::emulator {

constexpr int kMaxDevices = 64;

enum class StreamOrder { kEager, kLate, kRandom };

struct Streaming {
  StreamOrder order;
  uint64_t seed;  // seed of the order "random"
};

struct Settings {
  int devices;
  uint64_t memory;
  const Soc* soc;
  std::string soc_name;
  uint64_t seed;
  Streaming streams;
  Streaming engines;
  bool trace;
};

[[noreturn]] inline void refuse_setting(const char* name, const char* value, const char* allowed) {
  std::fprintf(stderr, "NPU emulator: %s is \"%s\"; it must be %s\n", name, value, allowed);
  std::abort();
}

// Reads an integer setting from `least` to `most`; `unset` is its default. `suffixes` allows K, M and G after
// the number.
inline uint64_t number_setting(const char* name, uint64_t unset, uint64_t least, uint64_t most,
                               const char* allowed, bool suffixes = false) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') {
    return unset;
  }
  char* end = nullptr;
  errno = 0;
  unsigned long long number = std::strtoull(value, &end, 10);
  bool good = errno == 0 && *value >= '0' && *value <= '9';
  if (suffixes && *end != '\0') {
    const int shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    good = good && shift != 0 && number <= (most >> shift);
    number <<= shift;
    ++end;
  }
  if (!good || *end != '\0' || number < least || number > most) {
    refuse_setting(name, value, allowed);
  }
  return number;
}

inline std::string name_setting(const char* name, const char* unset) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? unset : value;
}

inline Streaming streams_setting(const char* name) {
  const std::string value = name_setting(name, "eager");
  if (value == "eager" || value == "late") {
    return {value == "late" ? StreamOrder::kLate : StreamOrder::kEager, 0};
  }
  const std::string random = "random:";
  char* end = nullptr;
  errno = 0;
  const char* digits = value.c_str() + std::min(value.size(), random.size());
  const unsigned long long seed = std::strtoull(digits, &end, 10);
  if (value.rfind(random, 0) != 0 || *digits < '0' || *digits > '9' || *end != '\0' || errno != 0) {
    refuse_setting(name, value.c_str(), "eager, late, or random:SEED with a whole number below 2^64");
  }
  return {StreamOrder::kRandom, seed};
}

// Reads the name of a chip that the kernels are compiled for; the default is the first such chip in chips.h.
inline const Soc* soc_setting(const char* name) {
  const std::string value = name_setting(name, "");
  const Soc* first = nullptr;
  std::string allowed;
  for (const Soc& soc : kSocs) {
    if (soc.arch != REC_SDK_ASCENDC_ARCH) {
      continue;
    }
    if (value == soc.name) {
      return &soc;
    }
    first = first == nullptr ? &soc : first;
    allowed += (allowed.empty() ? "one of " : ", ") + std::string(soc.name);
  }
  if (!value.empty()) {
    refuse_setting(name, value.c_str(), allowed.c_str());
  }
  return first;
}

inline const Settings& settings() {
  // This object is never destroyed, because streams still run while the process ends.
  static const Settings& read = *new Settings{
      static_cast<int>(number_setting("REC_SDK_EMULATED_DEVICES", 2, 1, kMaxDevices,  //
                                      "a number of devices, 1 to 64")),
      number_setting("REC_SDK_EMULATED_MEMORY", uint64_t{16} << 30, 1 << 20, uint64_t{1} << 40,
                     "a number of bytes, 1M to 1024G; suffixes are K, M and G", true),
      soc_setting("REC_SDK_EMULATED_SOC"),
      name_setting("REC_SDK_EMULATED_SOC_NAME", "Ascend950PR_9589"),
      number_setting("REC_SDK_EMULATED_SEED", 0, 0, UINT64_MAX, "a whole number below 2^64"),
      streams_setting("REC_SDK_EMULATED_STREAMS"),
      streams_setting("REC_SDK_EMULATED_ENGINES"),
      number_setting("REC_SDK_EMULATED_TRACE", 0, 0, 1, "0 or 1") != 0,
  };
  return read;
}

}  // namespace rec_sdk::emulator
