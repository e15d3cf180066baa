// Tests of the time at which a core's engines run an instruction: at once, when it is waited for, or at
// random. Only the time at which bytes arrive is visible from outside.
#include <cmath>
#include <cstdlib>

#include "emulator/ascendc/engine/core.h"
#include "support.h"

namespace {

using rec_sdk::emulator::current_core;
using rec_sdk::emulator::event_index;
using rec_sdk::emulator::kScalar;
using rec_sdk::emulator::kVector;

constexpr uint32_t kCount = 8;

std::string engines() {
  const char* value = std::getenv("REC_SDK_EMULATED_ENGINES");
  return value == nullptr ? "eager" : value;
}

void test_when_copies_arrive() {
  Global<float> first("first", kCount, Access::kWrite), second("second", kCount, Access::kWrite);
  const auto arrived = [](const Global<float>& values) { return values.values[0] == 1.0f; };
  passes({first.buffer(), second.buffer()}, [&](Ub& ub) {
    const auto ones = ub.Alloc<float, kCount>();
    Duplicate(ones, 1.0f, kCount);
    order<HardEvent::V_MTE3>();
    copy_out(first.tensor(), ones, kCount);
    SetFlag<HardEvent::MTE3_S>(EVENT_ID0);
    copy_out(second.tensor(), ones, kCount);
    if (engines() == "eager") CHECK(arrived(first) && arrived(second));
    if (engines() == "late") CHECK(!arrived(first) && !arrived(second));
    WaitFlag<HardEvent::MTE3_S>(EVENT_ID0);
    CHECK(arrived(first));
    if (engines() == "late") CHECK(!arrived(second));  // only the first copy was waited for
    PipeBarrier<PIPE_ALL>();
    CHECK(arrived(second));
  });
  CHECK(arrived(second));
}

// A computation uses the scalar value and the bytes from the time at which it was issued, also if it runs
// later.
void test_effects_keep_their_operands() {
  Global<float> out("out", 2 * kCount, Access::kWrite);
  passes({out.buffer()}, [&](Ub& ub) {
    const auto x = ub.Alloc<float, kCount>(), y = ub.Alloc<float, kCount>();
    for (float value = 1; value <= 2; ++value) {
      Duplicate(x, value, kCount);
      PipeBarrier<PIPE_V>();
      Muls(value == 1 ? y : x, x, 10 * value, kCount);
      PipeBarrier<PIPE_V>();
    }
    order<HardEvent::V_MTE3>();
    copy_out(out.tensor(), y, kCount);
    copy_out(out.tensor()[kCount], x, kCount);
  });
  CHECK(out.values[0] == 10.0f && out.values[kCount] == 40.0f);
}

// Setting a flag twice, which the check in SetFlag forbids at any timing; the test bypasses this check.
void test_two_sets_of_a_flag() {
  const int event = event_index(kScalar, kVector);
  const std::string error = run([&] {
    current_core().schedule.set_flag(event, 0, false);
    current_core().schedule.wait_flag(event, 0);
    current_core().schedule.set_flag(event, 0, false);
    current_core().schedule.wait_flag(event, 0);
  });
  if (engines() == "eager") check_error(error, {});
  if (engines() == "late") check_error(error, {"flag S_V 0 is set while the last set of it is still up"});
}

void test_a_flag_that_never_comes_up() {
  const int event = event_index(kVector, kScalar);
  const std::string error = run([&] { current_core().schedule.wait_flag(event, 3); });
  if (engines() == "eager") check_error(error, {});
  if (engines() != "eager") check_error(error, {"flag V_S 3 never comes up"});
}

}  // namespace

int main() {
  test_when_copies_arrive();
  test_effects_keep_their_operands();
  test_two_sets_of_a_flag();
  test_a_flag_that_never_comes_up();
  return check_result();
}
