// Counters of the work of kernels, for a model of their cost. They are stored by kernel name and core, and
// summed over launches.
#pragma once

#include <cstdint>
#include <vector>

namespace rec_sdk::emulator {

struct Counters {
  int64_t mte2_instructions = 0;
  int64_t mte2_gm_bytes = 0;  // exact number of copied bytes
  int64_t mte2_ub_bytes = 0;  // bytes of all blocks, each rounded up to a multiple of 32
  int64_t mte3_instructions = 0;
  int64_t mte3_gm_bytes = 0;
  int64_t mte3_ub_bytes = 0;
  int64_t vector_instructions = 0;
  int64_t vector_elements = 0;
  int64_t vector_cycles = 0;  // cycles by vector_rates.h, without the cost of issuing and barriers
  int64_t scalar_gm_reads = 0;
  int64_t scalar_gm_writes = 0;
  int64_t scalar_ub_accesses = 0;
};

// Adds the counters of a launch; counters[i] are the counters of core i.
void count_launch(const char* kernel, const std::vector<Counters>& counters);

}  // namespace rec_sdk::emulator

extern "C" {
// Returns JSON: {"<kernel>": {"launches": 1, "blocks": 48, "<counter>": [one value per core], ...}, ...},
// where `blocks` is the sum over all launches. The string is valid until the next call on the same thread.
__attribute__((visibility("default"))) const char* rec_sdk_emulator_counters();
__attribute__((visibility("default"))) void rec_sdk_emulator_reset_counters();
}
