#include "tests/ascendc_kernels/update_batch.h"

namespace ascendc_tests {
namespace {

// Bits of the control register that earlier kernels may have changed when a kernel starts on the 950. With
// bit 53 changed, integers saturate; with bit 60 changed, bit 48 has no effect.
constexpr uint64_t kLeftByOthers =
    REC_SDK_ASCENDC_ARCH == 3510 ? uint64_t{1} << 53 | uint64_t{1} << 60 : uint64_t{0};

struct AtOnce {
  std::string title;

  template <class Body>
  void operator()(const char* name, int64_t blocks, const rec_sdk::emulator::Buffers& buffers,
                  const Body& body) const {
    run(title.empty() ? name : title + ": " + name, blocks, buffers, [&] {
      const auto control = static_cast<uint64_t>(get_ctrl());
      set_ctrl(control ^ kLeftByOthers);
      body();
      CHECK(static_cast<uint64_t>(get_ctrl()) == (control ^ kLeftByOthers));
      set_ctrl(control);
    });
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
