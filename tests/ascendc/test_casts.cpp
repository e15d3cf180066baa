// Compares casts between all pairs of types with scalar code, and tests saturation.
#include <cmath>
#include <limits>

#include "support.h"

namespace {

using Floats = std::vector<float>;
using Bits = std::vector<uint16_t>;  // the bit patterns of 16-bit floats

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr uint64_t kKeepsInfinity = uint64_t{1} << 48;

void set_saturation(bool on) {
  const auto control = static_cast<uint64_t>(get_ctrl());
  set_ctrl(on ? control & ~kKeepsInfinity : control | kKeepsInfinity);
}

// Returns the values cast to T. Results that are 16-bit floats saturate if `saturated` is set.
template <class T, class U>
std::vector<T> cast(const std::vector<U>& values, RoundMode mode, bool saturated = false) {
  std::vector<T> result;
  passes([&](Ub& ub) {
    set_saturation(saturated);
    const auto count = static_cast<uint32_t>(values.size());
    const auto from = ub.Alloc<U>(count);
    const auto to = ub.Alloc<T>(count);
    for (uint32_t i = 0; i < count; ++i) from.SetValue(i, values[i]);
    order<HardEvent::S_V>();
    Cast(to, from, mode, count);
    order<HardEvent::V_S>();
    for (uint32_t i = 0; i < count; ++i) result.push_back(to.GetValue(i));
    set_saturation(true);
  });
  return result;
}

// Checks that the results have the same bytes as `expected`.
template <class T, class U, class Expected>
void check(const std::vector<U>& values, RoundMode mode, const std::vector<Expected>& expected,
           bool saturated = false) {
  static_assert(sizeof(T) == sizeof(Expected));
  const std::vector<T> found = cast<T>(values, mode, saturated);
  CHECK(found.size() == expected.size());
  CHECK(std::memcmp(found.data(), expected.data(), expected.size() * sizeof(T)) == 0);
}

// Every bit pattern of a 16-bit format is unchanged by a cast to float and back, except that a NaN may become
// another NaN.
template <class T>
void test_all_16_bits() {
  for (int high = 0; high < 8; ++high) {
    std::vector<T> values(8192);
    for (int low = 0; low < 8192; ++low) values[low].bits = static_cast<uint16_t>(high * 8192 + low);
    const auto wide = cast<float>(values, RoundMode::CAST_NONE);
    const auto back = cast<T>(wide, RoundMode::CAST_RINT);
    for (size_t i = 0; i < values.size(); ++i) {
      CHECK(std::isnan(wide[i]) ? std::isnan(static_cast<float>(back[i])) : back[i].bits == values[i].bits);
    }
  }
}

void test_rounding_to_16_bits() {
  const float tiny = std::ldexp(1.0f, -11), ulp = std::ldexp(1.0f, -8);
  check<half>(Floats{1 + tiny, 1 + 3 * tiny, 1 + 1.5f * tiny, 65504, 65520, 1e-8f, 0.1f},
              RoundMode::CAST_RINT, Bits{0x3c00, 0x3c02, 0x3c01, 0x7bff, 0x7c00, 0, 0x2e66});
  check<half>(Floats{1 + 3 * tiny}, RoundMode::CAST_NONE, Bits{0x3c02});
  check<bfloat16_t>(Floats{1 + ulp, 1 + 3 * ulp, 1 + 1.5f * ulp, 3.4e38f, 0.1f}, RoundMode::CAST_RINT,
                    Bits{0x3f80, 0x3f82, 0x3f81, 0x7f80, 0x3dcd});
  check<half>(std::vector<int16_t>{2049, -3}, RoundMode::CAST_RINT, Bits{0x6800, 0xc200});
}

template <class T, class U>
void test_whole_numbers() {
  const Floats floats = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 2.4f, -2.6f, 7.0f};
  const std::vector<U> values(floats.begin(), floats.end());
  const auto check = [&](RoundMode mode, float (*round)(float)) {
    const auto results = cast<T>(values, mode);
    for (size_t i = 0; i < values.size(); ++i) {
      CHECK(results[i] == static_cast<T>(round(static_cast<float>(values[i]))));
    }
  };
  check(RoundMode::CAST_RINT, [](float v) { return std::nearbyint(v); });
  check(RoundMode::CAST_FLOOR, [](float v) { return std::floor(v); });
  check(RoundMode::CAST_CEIL, [](float v) { return std::ceil(v); });
  check(RoundMode::CAST_ROUND, [](float v) { return std::round(v); });
  check(RoundMode::CAST_TRUNC, [](float v) { return std::trunc(v); });
}

void test_saturation_of_integers() {
  const Floats values = {1e30f, -1e30f, kNan};
  const std::vector<int64_t> wide = {int64_t{1} << 40, -(int64_t{1} << 40), 7};
  check<int32_t>(values, RoundMode::CAST_TRUNC, std::vector<int32_t>{INT32_MAX, INT32_MIN, 0});
  check<int64_t>(values, RoundMode::CAST_RINT, std::vector<int64_t>{INT64_MAX, INT64_MIN, 0});
  check<int32_t>(wide, RoundMode::CAST_NONE, std::vector<int32_t>{INT32_MAX, INT32_MIN, 7});
  check<int16_t>(std::vector<int32_t>{70000}, RoundMode::CAST_NONE, std::vector<int16_t>{INT16_MAX});
}

// Without saturation, a cast is the host's own conversion. With saturation, infinity becomes the largest
// finite number and NaN becomes 0.
void test_saturation_of_16_bits() {
  const Floats values = {kInfinity, -kInfinity, kNan, -kNan, 1e6f, 3.4e38f, 1.5f, -65504};
  check<half>(values, RoundMode::CAST_RINT, Bits{0x7bff, 0xfbff, 0, 0, 0x7bff, 0x7bff, 0x3e00, 0xfbff}, true);
  check<bfloat16_t>(values, RoundMode::CAST_RINT, Bits{0x7f7f, 0xff7f, 0, 0, 0x4974, 0x7f7f, 0x3fc0, 0xc780},
                    true);
  check<half>(values, RoundMode::CAST_RINT, std::vector<half>(values.begin(), values.end()));
  check<bfloat16_t>(values, RoundMode::CAST_RINT, std::vector<bfloat16_t>(values.begin(), values.end()));
  // Saturation changes neither the source of a cast nor a float result.
  check<float>(std::vector<half>{half(kInfinity)}, RoundMode::CAST_NONE, Floats{kInfinity}, true);
}

// Results of arithmetic that are outside the range of half saturate too, if saturation is on.
void test_saturation_of_arithmetic() {
  for (const bool on : {true, false}) {
    passes([&](TPipe& pipe) {
      TBuf<> buffer;
      pipe.InitBuffer(buffer, 256);
      const auto x = buffer.GetWithOffset<half>(16, 0), y = buffer.GetWithOffset<half>(16, 32);
      const auto moved = buffer.GetWithOffset<half>(16, 64);
      const uint16_t infinity = on ? 0x7bff : 0x7c00;
      const auto check = [&](uint16_t expected) {
        order<HardEvent::V_S>();
        CHECK(y.GetValue(0).bits == expected);
        order<HardEvent::S_V>();
      };
      set_saturation(on);
      CHECK(((static_cast<uint64_t>(get_ctrl()) & kKeepsInfinity) == 0) == on);
      Duplicate(x, half(60000.0f), 16);
      PipeBarrier<PIPE_V>();
      Add(y, x, x, 16);
      check(infinity);
      Muls(y, x, half(-2.0f), 16);
      check(on ? 0xfbff : 0xfc00);
      ReduceSum(y, x, y, 16);
      check(infinity);
      Duplicate(y, half(kInfinity), 16);  // copies bits without saturation, like Gather
      check(0x7c00);
      Sub(moved, y, y, 16);
      order<HardEvent::V_S>();
      CHECK(on ? moved.GetValue(0).bits == 0 : std::isnan(static_cast<float>(moved.GetValue(0))));
      set_saturation(true);
    });
  }
}

void test_control_register() {
  twin({"end of the kernel", "bit 48 of the control register is 1", "set_ctrl must put back"}, {{}, 3},
       [](bool repaired) {
         const auto before = static_cast<uint64_t>(get_ctrl());
         // This holds even if the kernel before did not restore the register.
         CHECK((before & kKeepsInfinity) == 0);
         set_saturation(false);
         if (repaired) set_ctrl(before);
       });
  twin({"S, set_ctrl", "knows bit 48 only"}, [](bool repaired) {
    const auto before = static_cast<uint64_t>(get_ctrl());
    set_ctrl(repaired ? before : before ^ 1 << 6);
    set_ctrl(before);
  });
}

void test_integers_to_float() {
  check<float>(std::vector<int32_t>{16777217, -5}, RoundMode::CAST_RINT, Floats{16777216, -5});
  check<float>(std::vector<int64_t>{int64_t{1} << 40, -5}, RoundMode::CAST_RINT, Floats{0x1p40f, -5});
  check<float>(std::vector<int16_t>{-5}, RoundMode::CAST_NONE, Floats{-5});
  check<int64_t>(std::vector<int32_t>{-5}, RoundMode::CAST_NONE, std::vector<int64_t>{-5});
}

void test_modes() {
  twin({"V, Cast", "has no such RoundMode"}, [](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 8>();
    const auto y = ub.Alloc<bfloat16_t, 8>();
    Duplicate(x, 1.0f, 8);
    PipeBarrier<PIPE_V>();
    Cast(y, x, repaired ? RoundMode::CAST_RINT : RoundMode::CAST_NONE, 8);
  });
}

}  // namespace

int main() {
  test_all_16_bits<half>();
  test_all_16_bits<bfloat16_t>();
  test_rounding_to_16_bits();
  test_whole_numbers<int16_t, float>();
  test_whole_numbers<int32_t, float>();
  test_whole_numbers<int64_t, float>();
  test_whole_numbers<float, float>();
  test_whole_numbers<int16_t, half>();
  test_whole_numbers<int32_t, half>();
  test_whole_numbers<int32_t, bfloat16_t>();
  test_saturation_of_integers();
  test_saturation_of_16_bits();
  test_saturation_of_arithmetic();
  test_control_register();
  test_integers_to_float();
  test_modes();
  return check_result();
}
