// Counters of a kernel's work, for the model of its cost: per core, summed over launches, stored by kernel
// name.
#pragma once

#include <cstdint>
#include <vector>

namespace rec_sdk::emulator {

struct Counters {
  int64_t mte2_instructions = 0;
  int64_t mte2_gm_bytes = 0;  // exact number of bytes
  int64_t mte2_ub_bytes = 0;  // each block rounded up to 32 bytes
  int64_t mte3_instructions = 0;
  int64_t mte3_gm_bytes = 0;
  int64_t mte3_ub_bytes = 0;
  int64_t vector_instructions = 0;
  int64_t vector_elements = 0;
  int64_t vector_cycles = 0;  // by vector_rates.h, without issue and barriers
  int64_t scalar_gm_reads = 0;
  int64_t scalar_gm_writes = 0;
  int64_t scalar_ub_accesses = 0;
};

// Adds the counters of a launch; counters[i] belongs to core i.
void count_launch(const char* kernel, const std::vector<Counters>& counters);

}  // namespace rec_sdk::emulator

extern "C" {
// Returns JSON: {"<kernel>": {"launches": 1, "blocks": 48, "<counter>": [one value per core], ...}, ...};
// `blocks` is summed over launches. The string is valid until the thread's next call.
__attribute__((visibility("default"))) const char* rec_sdk_emulator_counters();
__attribute__((visibility("default"))) void rec_sdk_emulator_reset_counters();
}
