// Tests of a kernel's counters, which are summed over launches.
#include "emulator/ascendc/engine/core.h"
#include "support.h"

namespace {

Global<float> in("in", 64, Access::kRead), out("out", 10, Access::kWrite);

void kernel() {
  TPipe pipe;
  TBuf<TPosition::VECIN> buffer;
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

// The cycles of an instruction follow from the documented rates, rounded up.
void test_cycles() {
  passes([](TPipe& pipe) {
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 16384);
    const auto x = buffer.GetWithOffset<float>(1024, 0), y = buffer.GetWithOffset<float>(1024, 4096);
    const auto narrow = buffer.GetWithOffset<half>(1024, 8192);
    const auto wide = buffer.GetWithOffset<int64_t>(512, 12288);
    const auto cycles = [&](auto instruction) {
      const int64_t before = rec_sdk::emulator::current_core().counters.vector_cycles;
      instruction();
      PipeBarrier<PIPE_ALL>();
      return rec_sdk::emulator::current_core().counters.vector_cycles - before;
    };
    CHECK(cycles([&] { Duplicate(x, 1.0f, 1024); }) == 16);
    CHECK(cycles([&] { Duplicate(narrow, half(1.0f), 1024); }) == 8);
    CHECK(cycles([&] { Add(y, x, x, 65); }) == 2);
    CHECK(cycles([&] { Add(narrow, narrow, narrow, 128); }) == 1);
    CHECK(cycles([&] { Cast(narrow, x, RoundMode::CAST_RINT, 128); }) == 2);
    CHECK(cycles([&] { Cast(wide, x, RoundMode::CAST_RINT, 128); }) == 4);
    CHECK(cycles([&] { Axpy(y, narrow, half(1.0f), 64); }) == 1);
    CHECK(cycles([&] { Div(y, x, x, 64); }) == 2);
    CHECK(cycles([&] { Sqrt(narrow, narrow, 64); }) == 2);
    CHECK(cycles([&] { Rsqrt(y, x, 64); }) == 1);
    CHECK(cycles([&] { ReduceSum(y, x, y, 64); }) == 7);
    CHECK(cycles([&] { ReduceSum(y, x, y, 1024); }) == 112);
    CHECK(cycles([&] { Duplicate(y.ReinterpretCast<uint32_t>(), 0u, 64); }) == 1);
    CHECK(cycles([&] { Gather(x, x[512], y.ReinterpretCast<uint32_t>(), 0, 11); }) == 3);
    CHECK(cycles([&] { Add(y, x, x, 0); }) == 0);
    // The time of a strided instruction depends on how many bank groups its blocks are in.
    const auto strided = [&](uint8_t pitch) {
      return cycles([&] {
        masked(56, [&] { Add<float, false>(y, y, x, MASK_PLACEHOLDER, 1, {1, 1, pitch, 8, 8, 8}); });
      });
    };
    CHECK(strided(1) == 1);
    CHECK(strided(16) == 7);
    CHECK(strided(8) == 4);
    CHECK(strided(17) == 1);
    CHECK(strided(18) == 1);
  });
}

}  // namespace

int main() {
  rec_sdk_emulator_reset_counters();
  CHECK(std::strcmp(rec_sdk_emulator_counters(), "{}") == 0);
  for (int i = 0; i < 3; ++i) check_error(run(kernel, {{in.buffer(), out.buffer()}, 2}), {});
  CHECK(has("{\"kernel\": {\"launches\": 3, \"blocks\": 6, "));
  CHECK(has("\"mte2_instructions\": [3, 3], \"mte2_gm_bytes\": [180, 180], \"mte2_ub_bytes\": [288, 288]"));
  CHECK(has("\"mte3_instructions\": [3, 0], \"mte3_gm_bytes\": [120, 0], \"mte3_ub_bytes\": [192, 0]"));
  CHECK(has("\"vector_instructions\": [3, 3], \"vector_elements\": [60, 60], \"vector_cycles\": [3, 3]"));
  CHECK(has("\"scalar_gm_reads\": [3, 3], \"scalar_gm_writes\": [0, 0], \"scalar_ub_accesses\": [3, 3]"));
  passes({{}, 3}, [] {});
  CHECK(has("\"launches\": 4, \"blocks\": 9, \"mte2_instructions\": [3, 3, 0]"));
  rec_sdk_emulator_reset_counters();
  CHECK(has("{}"));
  test_cycles();
  return check_result();
}
