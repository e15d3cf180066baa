// The rules in which the 950 (A5) differs from A2 and A3. This test is compiled for arch 3510 and run with
// REC_SDK_EMULATED_SOC=Ascend950PR_9589.
#include <cmath>
#include <limits>

#include "emulator/ascendc/soc.h"
#include "op_kernels/common/ascendc/saturation.h"
#include "support.h"

namespace {

void test_sizes() {
  CHECK(rec_sdk::emulator::soc().arch == 3510);
  CHECK(rec_sdk::emulator::soc().vector_cores == 64);
  passes([](TPipe& pipe) {
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 253952);
  });
}

void test_nothing_to_do() {
  twin({"V, Duplicate", "count 0: only A2 and A3 do nothing then"},
       [](bool repaired, Ub& ub) { Duplicate(ub.Alloc<float, 8>(), 1.0f, repaired ? 1 : 0); });
}

void test_strides() {
  Global<float> in("in", 64, Access::kRead, 2.0f), out("out", 64, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  // A stride of -blockLen reads the same block each time.
  twin({"strides of -36 bytes", "from -blockLen on"}, buffers, [&](bool repaired, Ub& ub) {
    const auto local = ub.Alloc<float, 64>();
    DataCopyPad(local, in.tensor()[8], {3, 32, repaired ? -32 : -36, 0, 0}, {false, 0, 0, 0.0f});
  });
  twin({"65536 blocks in local memory"}, buffers, [&](bool repaired, Ub& ub) {
    const auto local = ub.Alloc<float, 64>();
    DataCopyPad(local, in.tensor(), {1, 32, 0, repaired ? 65535 : 65536, 0}, {false, 0, 0, 0.0f});
  });
}

// Gather has 16 bits for the index of a 16-bit element; srcBaseOffset extends the range.
void test_gather() {
  twin({"srcOffset[0] of Gather (V, ", "is 131072: for 16-bit elements 950 reaches 131071"},
       [](bool repaired, Ub& ub) {
         const auto values = ub.Alloc<half, 70000>();
         const auto at = ub.Alloc<uint32_t, 8>();
         Duplicate(values, half(1.0f), 70000);
         at.SetValue(0, repaired ? 131070u : 131072u);
         order<HardEvent::S_V>();
         PipeBarrier<PIPE_V>();
         Gather(ub.Alloc<half, 16>(), values, at, 4, 1);
       });
}

// Instructions with a scalar operand use the mask in their strided form.
void test_mask() {
  passes([](Ub& ub) {
    const auto x = ub.Alloc<float, 128>();
    Duplicate(x, 3.0f, 128);
    PipeBarrier<PIPE_V>();
    masked(100, [&] { Muls<float, false>(x, x, 2.0f, MASK_PLACEHOLDER, 1, {1, 1, 8, 8}); });
    order<HardEvent::V_S>();
    for (uint32_t i = 0; i < 128; ++i) CHECK(x.GetValue(i) == (i < 100 ? 6.0f : 3.0f));
  });
}

// The 950 allows copies to VECCALC.
void test_positions() {
  Global<float> in("in", 64, Access::kRead, 2.0f);
  passes({in.buffer()}, [&](TPipe& pipe) {
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 256);
    copy_in(buffer.Get<float>(), in.tensor(), 64);
  });
}

// Fills x with `value`, runs call(y, x), and returns the first element of y.
template <class T, class Call>
T computed(T value, const Call& call) {
  T result{};
  passes([&](Ub& ub) {
    const auto x = ub.Alloc<T, 16>(), y = ub.Alloc<T, 16>();
    Duplicate(x, value, 16);
    PipeBarrier<PIPE_V>();
    call(y, x);
    order<HardEvent::V_S>();
    result = y.GetValue(0);
  });
  return result;
}

// A subnormal quotient becomes 0 and keeps its sign. Huawei's documentation describes this for no other
// instruction.
void test_subnormal_quotients() {
  const auto quotient = [](float a, float b) {
    return computed(a, [&](const LocalTensor<float>& y, const LocalTensor<float>& x) {
      Duplicate(y, b, 16);
      PipeBarrier<PIPE_V>();
      Div(y, x, y, 16);
    });
  };
  CHECK(quotient(1e-38f, 10.0f) == 0 && !std::signbit(quotient(1e-38f, 10.0f)));
  CHECK(quotient(1e-38f, -10.0f) == 0 && std::signbit(quotient(1e-38f, -10.0f)));
  CHECK(quotient(0x1p-125f, 2.0f) == 0x1p-126f);
  CHECK(quotient(1e-40f, 1e-40f) == 1.0f);  // subnormal operands are kept
  const auto half_quotient =
      computed(half(0x1p-13f), [](const LocalTensor<half>& y, const LocalTensor<half>& x) {
        Duplicate(y, half(4.0f), 16);
        PipeBarrier<PIPE_V>();
        Div(y, x, y, 16);
      });
  CHECK(half_quotient.bits == 0);
  const auto halved = [](const LocalTensor<float>& y, const LocalTensor<float>& x) { Muls(y, x, 0.5f, 16); };
  CHECK(computed(0x1p-126f, halved) == 0x1p-127f);
}

constexpr uint64_t kKeepsInfinity = uint64_t{1} << 48, kIntegersSaturate = uint64_t{1} << 53,
                   kForAllOfCore = uint64_t{1} << 60;

uint64_t control() { return static_cast<uint64_t>(get_ctrl()); }

// Runs `work` with these bits of the control register flipped.
template <class Work>
void with_changed(uint64_t bits, const Work& work) {
  const uint64_t before = control();
  set_ctrl(before ^ bits);
  work();
  set_ctrl(before);
}

// Runs `work` with the settings of kernels whose results must be bit-identical to the host's, or without
// them.
template <class Work>
void maybe_as_on_host(bool as_on_host, const Work& work) {
  if (!as_on_host) return work();
  rec_sdk::ascendc::HostArithmetic arithmetic;
  arithmetic.start();
  work();
  arithmetic.finish();
}

// Casts infinity to half and returns the bits of the result.
uint16_t converted_infinity(uint64_t changed_bits, bool as_on_host) {
  uint16_t bits = 0;
  passes([&](Ub& ub) {
    const auto x = ub.Alloc<float, 16>();
    const auto y = ub.Alloc<half, 16>();
    with_changed(changed_bits, [&] {
      const uint64_t found = control();
      maybe_as_on_host(as_on_host, [&] {
        Duplicate(x, std::numeric_limits<float>::infinity(), 16);
        PipeBarrier<PIPE_V>();
        Cast(y, x, RoundMode::CAST_RINT, 16);
      });
      CHECK(control() == found);
    });
    order<HardEvent::V_S>();
    bits = y.GetValue(0).bits;
  });
  return bits;
}

// With bit 48 set, a cast keeps infinity, but only while bit 60 is 1, its initial value.
void test_saturation() {
  CHECK(converted_infinity(0, false) == 0x7bff);
  CHECK(converted_infinity(kKeepsInfinity, false) == 0x7c00);
  CHECK(converted_infinity(kKeepsInfinity | kForAllOfCore, false) == 0x7bff);
  for (const uint64_t found : {uint64_t{0}, kKeepsInfinity, kForAllOfCore, kKeepsInfinity | kForAllOfCore}) {
    CHECK(converted_infinity(found, true) == 0x7c00);
  }
}

template <class T>
void check_overflow() {
  const T most = std::numeric_limits<T>::max(), least = std::numeric_limits<T>::min();
  using Tensor = LocalTensor<T>;
  const auto check = [&](T value, T wrapped, T saturated, const auto& call) {
    for (const bool saturates : {false, true}) {
      for (const bool as_on_host : {false, true}) {
        const T found = computed(value, [&](const Tensor& y, const Tensor& x) {
          with_changed(saturates ? kIntegersSaturate : 0,
                       [&] { maybe_as_on_host(as_on_host, [&] { call(y, x); }); });
        });
        CHECK(found == (saturates && !as_on_host ? saturated : wrapped));
      }
    }
  };
  const auto twice = static_cast<T>(-2);
  check(most, twice, most, [](const Tensor& y, const Tensor& x) { Add(y, x, x, 16); });
  check(most, static_cast<T>(1), most, [](const Tensor& y, const Tensor& x) { Mul(y, x, x, 16); });
  check(most, least, most, [](const Tensor& y, const Tensor& x) { Adds(y, x, T(1), 16); });
  check(most, twice, most, [](const Tensor& y, const Tensor& x) { Muls(y, x, T(2), 16); });
  check(most, static_cast<T>(2), least, [](const Tensor& y, const Tensor& x) { Muls(y, x, T(-2), 16); });
  check(least, most, least, [](const Tensor& y, const Tensor& x) {
    Duplicate(y, T(1), 16);
    PipeBarrier<PIPE_V>();
    Sub(y, x, y, 16);
  });
  check(least, static_cast<T>(0), static_cast<T>(0),
        [](const Tensor& y, const Tensor& x) { Sub(y, x, x, 16); });
}

void test_control_register() {
  const std::pair<uint64_t, Words> left[] = {
      {kKeepsInfinity, {"bit 48 of the control register is 1, but was 0", "do not saturate"}},
      {kIntegersSaturate, {"bit 53 of the control register is 1, but was 0", "integers saturate"}},
      {kForAllOfCore, {"bit 60 of the control register is 0, but was 1", "bit 48 has no effect"}},
  };
  for (const auto& [bit, words] : left) {
    twin(words, {{}, 2}, [bit = bit](bool repaired) {
      const uint64_t before = control();
      set_ctrl(before ^ bit);
      if (repaired) set_ctrl(before);
    });
  }
  twin({"S, set_ctrl", "knows bits 48, 53 and 60 only"},
       [](bool repaired) { with_changed(repaired ? kIntegersSaturate : uint64_t{1} << 59, [] {}); });
}

}  // namespace

int main() {
  test_sizes();
  test_nothing_to_do();
  test_strides();
  test_gather();
  test_mask();
  test_positions();
  test_subnormal_quotients();
  test_saturation();
  check_overflow<int16_t>();
  check_overflow<int32_t>();
  test_control_register();
  return check_result();
}
