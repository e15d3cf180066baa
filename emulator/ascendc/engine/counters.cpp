#include "emulator/ascendc/engine/counters.h"

#include <map>
#include <mutex>
#include <string>

namespace rec_sdk::emulator {
namespace {

struct Field {
  const char* name;
  int64_t Counters::* value;
};

constexpr Field kFields[] = {
    {"mte2_instructions", &Counters::mte2_instructions},
    {"mte2_gm_bytes", &Counters::mte2_gm_bytes},
    {"mte2_ub_bytes", &Counters::mte2_ub_bytes},
    {"mte3_instructions", &Counters::mte3_instructions},
    {"mte3_gm_bytes", &Counters::mte3_gm_bytes},
    {"mte3_ub_bytes", &Counters::mte3_ub_bytes},
    {"vector_instructions", &Counters::vector_instructions},
    {"vector_elements", &Counters::vector_elements},
    {"vector_cycles", &Counters::vector_cycles},
    {"scalar_gm_reads", &Counters::scalar_gm_reads},
    {"scalar_gm_writes", &Counters::scalar_gm_writes},
    {"scalar_ub_accesses", &Counters::scalar_ub_accesses},
};

struct KernelTotals {
  int64_t launches = 0;
  int64_t blocks = 0;
  std::vector<Counters> cores;
};

std::mutex totals_mutex;

std::map<std::string, KernelTotals>& totals() {
  // This object is never destroyed, because kernels still run while the process ends.
  static auto& kernels = *new std::map<std::string, KernelTotals>();
  return kernels;
}

void append(std::string& text, const KernelTotals& kernel) {
  text += "{\"launches\": " + std::to_string(kernel.launches);
  text += ", \"blocks\": " + std::to_string(kernel.blocks);
  for (const Field& field : kFields) {
    text += std::string(", \"") + field.name + "\": [";
    for (size_t i = 0; i < kernel.cores.size(); ++i) {
      text += (i == 0 ? "" : ", ") + std::to_string(kernel.cores[i].*field.value);
    }
    text += "]";
  }
  text += "}";
}

}  // namespace

void count_launch(const char* kernel, const std::vector<Counters>& counters) {
  const std::lock_guard<std::mutex> lock(totals_mutex);
  KernelTotals& total = totals()[kernel];
  total.launches += 1;
  total.blocks += static_cast<int64_t>(counters.size());
  if (total.cores.size() < counters.size()) {
    total.cores.resize(counters.size());
  }
  for (size_t i = 0; i < counters.size(); ++i) {
    for (const Field& field : kFields) {
      total.cores[i].*field.value += counters[i].*field.value;
    }
  }
}

}  // namespace rec_sdk::emulator

const char* rec_sdk_emulator_counters() {
  using namespace rec_sdk::emulator;
  thread_local std::string text;
  const std::lock_guard<std::mutex> lock(totals_mutex);
  text = "{";
  for (const auto& [name, kernel] : totals()) {
    text += (text.size() == 1 ? "\"" : ", \"") + name + "\": ";
    append(text, kernel);
  }
  text += "}";
  return text.c_str();
}

void rec_sdk_emulator_reset_counters() {
  const std::lock_guard<std::mutex> lock(rec_sdk::emulator::totals_mutex);
  rec_sdk::emulator::totals().clear();
}
