#include "tests/ascendc_kernels/update_batch.h"

namespace ascendc_tests {
namespace {

struct AtOnce {
  std::string title;

  template <class Body>
  void operator()(const char* name, int64_t blocks, const rec_sdk::emulator::Buffers& buffers,
                  const Body& body) const {
    run(title.empty() ? name : title + ": " + name, blocks, buffers, body);
  }
};

}  // namespace

void run_update_rows(const std::string& title, const rec_sdk::UpdateRows& a, const char* optimizer,
                     void* workspace, int64_t cores) {
  rec_sdk::emulator::run_update_rows(AtOnce{title}, a, optimizer, workspace, cores);
}

void run_accumulate_rows(const std::string& title, const rec_sdk::AccumulateRows& a, void* workspace,
                         int64_t cores) {
  rec_sdk::emulator::run_accumulate_rows(AtOnce{title}, a, workspace, cores);
}

}  // namespace ascendc_tests
