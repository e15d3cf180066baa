// The counters of a kernel, summed over launches.
#include <cstring>

#include "support.h"
#include "torch_npu_ext/emulator/ascendc/engine/counters.h"

namespace {

Global<float> in("in", 64, Access::kRead), out("out", 64, Access::kWrite);

void kernel() {
  TPipe pipe;
  TBuf<> buffer;
  pipe.InitBuffer(buffer, 1024);
  const auto x = buffer.Get<float>();
  DataCopyPad(x, in.tensor(), {3, 20, 0, 0, 0}, {false, 0, 0, 0.0f});
  order<HardEvent::MTE2_V>();
  Adds(x, x, 1.0f, 20);
  order<HardEvent::V_S>();
  x.GetValue(0);
  in.tensor().GetValue(5);
  if (GetBlockIdx() == 0) {
    order<HardEvent::V_MTE3>();
    copy_out(out.tensor(), x, 10);
  }
}

bool has(const char* text) { return std::strstr(rec_sdk_emulator_counters(), text) != nullptr; }

}  // namespace

int main() {
  rec_sdk_emulator_reset_counters();
  CHECK(std::strcmp(rec_sdk_emulator_counters(), "{}") == 0);
  for (int i = 0; i < 3; ++i) CHECK_PASSES(run(kernel, {in.buffer(), out.buffer()}, 2));
  CHECK(has("{\"kernel\": {\"launches\": 3, \"blocks\": 6, "));
  CHECK(has("\"mte2_instructions\": [3, 3], \"mte2_gm_bytes\": [180, 180], \"mte2_ub_bytes\": [288, 288]"));
  CHECK(has("\"mte3_instructions\": [3, 0], \"mte3_gm_bytes\": [120, 0], \"mte3_ub_bytes\": [192, 0]"));
  CHECK(has("\"vector_instructions\": [3, 3], \"vector_elements\": [60, 60]"));
  CHECK(has("\"scalar_gm_reads\": [3, 3], \"scalar_gm_writes\": [0, 0], \"scalar_ub_accesses\": [3, 3]"));
  CHECK_PASSES(run([] {}, {}, 3));
  CHECK(has("\"launches\": 4, \"blocks\": 9, \"mte2_instructions\": [3, 3, 0]"));
  rec_sdk_emulator_reset_counters();
  CHECK(has("{}"));
  return check_result();
}
