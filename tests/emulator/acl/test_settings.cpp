// Environment variables: their effects, and that an invalid value ends the process with a message.
#include <signal.h>

#include "settings.h"
#include "support.h"

namespace {

using rec_sdk::emulator::Settings;
using rec_sdk::emulator::settings;
using rec_sdk::emulator::StreamOrder;

void check_refused(const char* name, const char* value, const char* allowed) {
  const Ending ending = in_child([=] {
    setenv(name, value, 1);
    aclInit(nullptr);
  });
  CHECK(WIFSIGNALED(ending.status) && WTERMSIG(ending.status) == SIGABRT);
  CHECK(
      contains(ending.output, (std::string(name) + " is \"" + value + "\"; it must be " + allowed).c_str()));
}

void check_taken(const char* name, const char* value, bool (*expected)(const Settings&)) {
  const Ending ending = in_child([=] {
    setenv(name, value, 1);
    _exit(expected(settings()) ? 0 : 1);
  });
  CHECK(ending.status == 0);
}

}  // namespace

int main() {
  for (const char* bad : {"0", "65", "-1", "two", "2x", "1 "}) {
    check_refused("REC_SDK_EMULATED_DEVICES", bad, "a number of devices, 1 to 64");
  }
  for (const char* bad : {"1", "1T", "-1G", "99999999999999999999", "2000G", "1GB", "G", "17592186044416G"}) {
    check_refused("REC_SDK_EMULATED_MEMORY", bad, "a number of bytes, 1M to 1024G");
  }
  check_refused("REC_SDK_EMULATED_SEED", "-1", "a whole number below 2^64");
  for (const char* bad : {"Late", "lately", "rand", "random", "random:", "random:-1", "random:1x",
                          "random: 1", "random:18446744073709551616", "1"}) {
    check_refused("REC_SDK_EMULATED_STREAMS", bad,
                  "eager, late, or random:SEED with a whole number below 2^64");
  }
  check_refused("REC_SDK_EMULATED_TRACE", "yes", "0 or 1");
  for (const char* bad : {"Ascend910", "ascend910b1", "Ascend950PR_9589"}) {
    check_refused("REC_SDK_EMULATED_SOC", bad, "one of Ascend910B1, Ascend910B2, ");
  }

  check_taken("REC_SDK_EMULATED_DEVICES", "", [](const Settings& s) { return s.devices == 2; });
  check_taken("REC_SDK_EMULATED_DEVICES", "64", [](const Settings& s) { return s.devices == 64; });
  check_taken("REC_SDK_EMULATED_MEMORY", "",
              [](const Settings& s) { return s.memory == uint64_t{16} << 30; });
  check_taken("REC_SDK_EMULATED_MEMORY", "1048576", [](const Settings& s) { return s.memory == 1 << 20; });
  check_taken("REC_SDK_EMULATED_MEMORY", "3000K", [](const Settings& s) { return s.memory == 3000 << 10; });
  check_taken("REC_SDK_EMULATED_MEMORY", "64M", [](const Settings& s) { return s.memory == 64 << 20; });
  check_taken("REC_SDK_EMULATED_MEMORY", "1024G",
              [](const Settings& s) { return s.memory == uint64_t{1} << 40; });
  check_taken("REC_SDK_EMULATED_SEED", "18446744073709551615",
              [](const Settings& s) { return s.seed == UINT64_MAX; });
  check_taken("REC_SDK_EMULATED_ENGINES", "random:7", [](const Settings& s) {
    return s.engines.order == StreamOrder::kRandom && s.engines.seed == 7 &&
           s.streams.order == StreamOrder::kEager;
  });
  check_refused("REC_SDK_EMULATED_ENGINES", "lazy", "eager, late, or random:SEED");
  check_taken("REC_SDK_EMULATED_STREAMS", "",
              [](const Settings& s) { return s.streams.order == StreamOrder::kEager; });
  check_taken("REC_SDK_EMULATED_STREAMS", "eager",
              [](const Settings& s) { return s.streams.order == StreamOrder::kEager; });
  check_taken("REC_SDK_EMULATED_STREAMS", "late",
              [](const Settings& s) { return s.streams.order == StreamOrder::kLate; });
  check_taken("REC_SDK_EMULATED_STREAMS", "random:18446744073709551615", [](const Settings& s) {
    return s.streams.order == StreamOrder::kRandom && s.streams.seed == UINT64_MAX;
  });
  check_taken("REC_SDK_EMULATED_TRACE", "1", [](const Settings& s) { return s.trace; });
  check_taken("REC_SDK_EMULATED_SOC", "",
              [](const Settings& s) { return s.soc->name == std::string("Ascend910B1"); });
  check_taken("REC_SDK_EMULATED_SOC", "Ascend910B4",
              [](const Settings& s) { return s.soc->vector_cores == 40; });
  check_taken("REC_SDK_EMULATED_SOC_NAME", "Ascend910_9382",
              [](const Settings& s) { return s.soc_name == "Ascend910_9382"; });
  return check_result();
}
