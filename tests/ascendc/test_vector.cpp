// Compares every instruction of the vector unit with scalar code, at odd lengths and in place, and tests its
// rules.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "support.h"

namespace {

constexpr int32_t kCounts[] = {1, 7, 8, 64, 129};

template <class T>
std::vector<T> numbers(int32_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> values;
  for (int32_t i = 0; i < count; ++i) {
    const float value = std::uniform_real_distribution<float>(0.1f, 100.0f)(random);
    values.push_back(static_cast<T>(random() % 4 == 0 ? -value : value));
  }
  return values;
}

template <class T>
bool same(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0 ||
         (static_cast<float>(a) != static_cast<float>(a) && static_cast<float>(b) != static_cast<float>(b));
}

// Returns the value with saturation of half: infinity becomes the largest finite number, and NaN becomes 0.
template <class T>
T saturated(T value) {
  if constexpr (kOneOf<T, half>) {
    const auto wide = static_cast<float>(value);
    return std::isnan(wide) ? half(0.0f) : std::isinf(wide) ? half(std::copysign(65504.0f, wide)) : value;
  }
  return value;
}

template <class T>
LocalTensor<T> local(Ub& ub, const std::vector<T>& values) {
  const auto tensor = ub.Alloc<T>(static_cast<uint32_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i) tensor.SetValue(static_cast<uint32_t>(i), values[i]);
  order<HardEvent::S_V>();
  order<HardEvent::V_S>();  // allows to set flag S_V again
  return tensor;
}

// The type in which expected results are computed: float for 16-bit floats, otherwise T.
template <class T>
using Wide = std::conditional_t<std::is_integral_v<T>, T, float>;

// An instruction, and its expected result for one element.
template <class T>
struct Operation {
  using Tensor = const LocalTensor<T>&;
  void (*call)(Tensor z, Tensor x, Tensor y, int32_t count);
  Wide<T> (*expected)(Wide<T> a, Wide<T> b);

  // Checks the instruction with a third tensor as its result, and in place.
  void check() const {
    for (const int32_t count : kCounts) {
      const auto a = numbers<T>(count, 1), b = numbers<T>(count, 2);
      passes([&](Ub& ub) {
        const auto x = local(ub, a), y = local(ub, b);
        const auto z = ub.Alloc<T>(static_cast<uint32_t>(count));
        call(z, x, y, count);
        PipeBarrier<PIPE_V>();
        call(x, x, y, count);
        order<HardEvent::V_S>();
        for (int32_t i = 0; i < count; ++i) {
          const T value = saturated(static_cast<T>(expected(Wide<T>(a[i]), Wide<T>(b[i]))));
          CHECK(same(z.GetValue(i), value) && same(x.GetValue(i), value));
        }
      });
    }
  }
};

template <class T>
void test_arithmetic() {
  using Ts = const LocalTensor<T>&;
  using W = Wide<T>;
  const Operation<T> operations[] = {
      {[](Ts z, Ts x, Ts y, int32_t n) { Add(z, x, y, n); }, [](W a, W b) { return W(a + b); }},
      {[](Ts z, Ts x, Ts y, int32_t n) { Sub(z, x, y, n); }, [](W a, W b) { return W(a - b); }},
      {[](Ts z, Ts x, Ts y, int32_t n) { Mul(z, x, y, n); }, [](W a, W b) { return W(a * b); }},
      {[](Ts z, Ts x, Ts y, int32_t n) { Max(z, x, y, n); }, [](W a, W b) { return std::max(a, b); }},
      {[](Ts z, Ts x, Ts y, int32_t n) { Min(z, x, y, n); }, [](W a, W b) { return std::min(a, b); }},
      {[](Ts z, Ts x, Ts, int32_t n) { Adds(z, x, T(3), n); }, [](W a, W) { return W(a + 3); }},
      {[](Ts z, Ts x, Ts, int32_t n) { Muls(z, x, T(3), n); }, [](W a, W) { return W(a * 3); }},
      {[](Ts z, Ts x, Ts, int32_t n) { Maxs(z, x, T(3), n); }, [](W a, W) { return std::max(a, W(3)); }},
      {[](Ts z, Ts x, Ts, int32_t n) { Mins(z, x, T(3), n); }, [](W a, W) { return std::min(a, W(3)); }},
  };
  for (const Operation<T>& operation : operations) operation.check();
}

template <class T>
void test_functions() {
  using Ts = const LocalTensor<T>&;
  const Operation<T> operations[] = {
      {[](Ts z, Ts x, Ts y, int32_t n) { Div(z, x, y, n); }, [](float a, float b) { return a / b; }},
      {[](Ts z, Ts x, Ts, int32_t n) { Sqrt(z, x, n); }, [](float a, float) { return std::sqrt(a); }},
      {[](Ts z, Ts x, Ts, int32_t n) { Exp(z, x, n); }, [](float a, float) { return std::exp(a); }},
      {[](Ts z, Ts x, Ts, int32_t n) { Ln(z, x, n); }, [](float a, float) { return std::log(a); }},
      {[](Ts z, Ts x, Ts, int32_t n) { Abs(z, x, n); }, [](float a, float) { return std::fabs(a); }},
  };
  for (const Operation<T>& operation : operations) operation.check();
}

// Rsqrt and Reciprocal are approximations, which are too coarse for a kernel to rely on.
template <class T>
void test_coarse_functions(float bound) {
  passes([&](Ub& ub) {
    const std::vector<T> values = {T(3.0f), T(7.0f), T(0.3f), T(5.5f)};
    const auto x = local(ub, values);
    const auto root = ub.Alloc<T, 16>(), inverse = ub.Alloc<T, 16>();
    Rsqrt(root, x, 4);
    Reciprocal(inverse, x, 4);
    order<HardEvent::V_S>();
    float worst = 0;
    for (uint32_t i = 0; i < 4; ++i) {
      const auto value = static_cast<float>(values[i]);
      const float root_error = static_cast<float>(root.GetValue(i)) * std::sqrt(value) - 1;
      const float inverse_error = static_cast<float>(inverse.GetValue(i)) * value - 1;
      CHECK(std::fabs(root_error) < 5 * bound && std::fabs(inverse_error) < 5 * bound);
      worst = std::max({worst, std::fabs(root_error), std::fabs(inverse_error)});
    }
    CHECK(worst > bound);
  });
}

void test_integers_wrap() {
  passes([](Ub& ub) {
    const auto x = local(ub, std::vector<int32_t>{INT32_MAX, INT32_MIN});
    Adds(x, x, 1, 2);
    PipeBarrier<PIPE_V>();
    Muls(x, x, 3, 2);
    order<HardEvent::V_S>();
    CHECK(x.GetValue(0) == INT32_MIN);
    CHECK(x.GetValue(1) == INT32_MIN + 3);
  });
}

void test_not_a_number() {
  using Tensor = const LocalTensor<float>&;
  void (*const calls[])(Tensor z, Tensor nan, Tensor one) = {
      [](Tensor z, Tensor nan, Tensor) { Maxs(z, nan, 0.0f, 1); },
      [](Tensor z, Tensor nan, Tensor) { Mins(z, nan, 2.0f, 1); },
      [](Tensor z, Tensor nan, Tensor one) { Max(z, nan, one, 1); },
      [](Tensor z, Tensor nan, Tensor one) { Max(z, one, nan, 1); },
      [](Tensor z, Tensor nan, Tensor one) { Min(z, nan, one, 1); },
      [](Tensor z, Tensor nan, Tensor one) { Min(z, one, nan, 1); },
  };
  for (const auto call : calls) {
    passes([&](Ub& ub) {
      const auto z = ub.Alloc<float, 8>();
      call(z, local<float>(ub, {std::numeric_limits<float>::quiet_NaN()}), local<float>(ub, {1.0f}));
      order<HardEvent::V_S>();
      CHECK(std::isnan(z.GetValue(0)));
    });
  }
}

template <class T, class U>
void test_axpy() {
  for (const int32_t count : kCounts) {
    const auto a = numbers<U>(count, 3);
    const auto sums = numbers<T>(count, 4);
    const U scalar = static_cast<U>(0.3f);
    passes([&](Ub& ub) {
      const auto x = local(ub, a);
      const auto z = local(ub, sums);
      Axpy(z, x, scalar, count);
      order<HardEvent::V_S>();
      for (int32_t i = 0; i < count; ++i) {
        const T product = T(static_cast<float>(a[i]) * static_cast<float>(scalar));
        const T sum = T(static_cast<float>(sums[i]) + static_cast<float>(product));
        CHECK(same(z.GetValue(i), sum));
      }
    });
  }
}

template <class T>
void test_duplicate(T value) {
  passes([&](Ub& ub) {
    const auto x = ub.Alloc<T, 128>();
    Duplicate(x, value, 77);
    order<HardEvent::V_S>();
    for (uint32_t i = 0; i < 77; ++i) CHECK(same(x.GetValue(i), value));
  });
}

// Sums values in the tree order in which the hardware adds up to 256 bytes.
template <class T>
T tree(const std::vector<T>& values, size_t begin, size_t count) {
  if (count == 1) return values[begin];
  size_t half = 1;
  while (2 * half < count) half *= 2;
  return T(static_cast<float>(tree(values, begin, half)) +
           static_cast<float>(tree(values, begin + half, count - half)));
}

template <class T>
T sum_of_repeats(const std::vector<T>& values) {
  constexpr size_t kRepeat = 256 / sizeof(T);
  T total = tree(values, 0, std::min(kRepeat, values.size()));
  for (size_t i = kRepeat; i < values.size(); i += kRepeat) {
    const T sum = tree(values, i, std::min(kRepeat, values.size() - i));
    total = T(static_cast<float>(total) + static_cast<float>(sum));
  }
  return total;
}

template <class T>
void test_reduce_sum() {
  for (const int32_t count : {1, 2, 3, 63, 64, 100, 1000}) {
    const auto values = numbers<T>(count, 5);
    passes([&](TPipe& pipe) {
      TBuf<> buffer;
      pipe.InitBuffer(buffer, 8192);
      const auto x = buffer.GetWithOffset<T>(1024, 0), sum = buffer.GetWithOffset<T>(64, 4096);
      for (int32_t i = 0; i < count; ++i) x.SetValue(i, values[i]);
      order<HardEvent::S_V>();
      ReduceSum(sum, x, sum, count);
      CHECK(same(sum.GetValue(0), sum_of_repeats(values)));
      SetFlag<HardEvent::S_V>(EVENT_ID1);
      WaitFlag<HardEvent::S_V>(EVENT_ID1);
      Adds(sum, sum, T(1.0f), 1);
    });
  }
  const std::string without_pipe = run([] {
    Ub ub;
    const auto x = ub.Alloc<T, 64>();
    Duplicate(x, T(1.0f), 64);
    PipeBarrier<PIPE_V>();
    ReduceSum(x, x, x, 64);
  });
  check_error(without_pipe, {"ReduceSum", "needs a TPipe"});
}

void test_gather() {
  twin({"Gather (V, ", "srcOffset[2]", "leads to byte 256 of src, which has 256"}, [](bool repaired, Ub& ub) {
    const auto x = local(ub, numbers<float>(64, 6));
    const auto at = local(ub, std::vector<uint32_t>{8, 0, repaired ? 240u : 244u, 8});
    const auto z = ub.Alloc<float, 8>();
    Gather(z, x, at, 12, 4);
    order<HardEvent::V_S>();
    const size_t expected[] = {5, 3, 63, 5};
    for (uint32_t i = 0; i < 4; ++i) CHECK(z.GetValue(i) == numbers<float>(64, 6)[expected[i]]);
  });
  twin({"must lie inside and be a multiple of 4"}, [](bool repaired, Ub& ub) {
    const auto x = local(ub, numbers<float>(64, 6));
    const auto at = local(ub, std::vector<uint32_t>{repaired ? 4u : 2u});
    Gather(ub.Alloc<float, 8>(), x, at, 0, 1);
  });
}

void test_overlap() {
  twin({"dst [32, 96) overlaps src0 [0, 64)"}, [](bool repaired, Ub& ub) {
    const auto x = local(ub, numbers<float>(64, 7));
    Adds(x[repaired ? 16 : 8], x, 1.0f, 16);
  });
  twin({"dst [0, 128) overlaps src0 [0, 256)"}, [](bool repaired, Ub& ub) {
    const auto x = local(ub, numbers<float>(64, 7));
    const auto y = repaired ? ub.Alloc<half, 64>() : x.ReinterpretCast<half>();
    Cast(y, x, RoundMode::CAST_RINT, 64);
  });
  twin({"count -1"}, [](bool repaired, Ub& ub) {
    const auto x = local(ub, numbers<float>(64, 7));
    Adds(x, x, 1.0f, repaired ? 0 : -1);
  });
}

// A mask that several instructions share.
void test_mask() {
  for (const int32_t count : kCounts) {
    const auto a = numbers<float>(count, 1), b = numbers<float>(count, 2);
    passes([&](Ub& ub) {
      const auto x = local(ub, a), y = local(ub, b);
      const auto z = ub.Alloc<float>(static_cast<uint32_t>(count + 1));
      Duplicate(z, 7.0f, count + 1);
      PipeBarrier<PIPE_V>();
      masked(count, [&] {
        Add<float, false>(z, x, y, MASK_PLACEHOLDER, 1, {});
        PipeBarrier<PIPE_V>();
        Muls<float, false>(z, z, 2.0f, MASK_PLACEHOLDER, 1, {});
      });
      order<HardEvent::V_S>();
      for (int32_t i = 0; i < count; ++i) CHECK(z.GetValue(i) == 2.0f * (a[i] + b[i]));
      CHECK(z.GetValue(count) == 7.0f);
    });
  }
  enum Mistake { kNoMode, kNoMask, kOwnMask, kNoEnd, kNoReset, kRepeats, kOnTop };
  const std::pair<Mistake, Words> mistakes[] = {
      {kNoMode, {"V, Add (", "SetMaskCount and SetVectorMask<T, MaskMode::COUNTER> must come before"}},
      {kNoMask, {"V, Add (", "SetMaskCount and SetVectorMask<T, MaskMode::COUNTER> must come before"}},
      {kOwnMask, {"V, Adds (", "SetMaskNorm and ResetMask must come before"}},
      {kNoEnd, {"SetMaskNorm and ResetMask must end what SetMaskCount began"}},
      {kNoReset, {"SetMaskNorm and ResetMask must end what SetMaskCount began"}},
      {kRepeats, {"V, Add (", "repeatTime 2: where the mask counts elements it says nothing"}},
      {kOnTop, {"V, Add (", "its elements would lie on top of each other"}},
  };
  for (const auto& [mistake, words] : mistakes) {
    twin(words, [mistake = mistake](bool repaired, Ub& ub) {
      const auto is = [=](Mistake one) { return !repaired && mistake == one; };
      const auto x = local(ub, numbers<float>(64, 1));
      if (!is(kNoMode)) SetMaskCount();
      if (!is(kNoMask) && !is(kNoMode)) SetVectorMask<float, MaskMode::COUNTER>(64);
      BinaryRepeatParams strides;
      if (is(kOnTop)) strides.dstBlkStride = 0;
      Add<float, false>(x, x, x, MASK_PLACEHOLDER, is(kRepeats) ? 2 : 1, strides);
      PipeBarrier<PIPE_V>();
      if (is(kOwnMask)) Adds(x, x, 1.0f, 64);
      if (!is(kNoEnd)) SetMaskNorm();
      if (!is(kNoReset)) ResetMask();
    });
  }
  twin({"S, SetVectorMask (", "SetMaskCount must come before"}, [](bool repaired) {
    if (repaired) SetMaskCount();
    SetVectorMask<float, MaskMode::COUNTER>(8);
    SetMaskNorm();
    ResetMask();
  });
}

// Strided blocks of 8 floats: adds a matrix's column of blocks to contiguous values.
void test_strides() {
  constexpr int32_t kPitch = 24, kRows = 11, kColumn = 8, kCount = 8 * kRows - 3;
  const auto matrix = numbers<float>(kPitch * kRows, 3), sums = numbers<float>(8 * kRows, 4);
  const auto add = [&](const LocalTensor<float>& z, const LocalTensor<float>& x, const LocalTensor<float>& y,
                       const BinaryRepeatParams& strides) {
    masked(kCount, [&] { Add<float, false>(z, x, y, MASK_PLACEHOLDER, 1, strides); });
    order<HardEvent::V_S>();
  };
  const BinaryRepeatParams column(1, 1, kPitch / 8, 8, 8, kPitch);
  passes([&](Ub& ub) {
    const auto x = local(ub, sums), y = local(ub, matrix);
    add(x, x, y[kColumn], column);
    for (int32_t i = 0; i < 8 * kRows; ++i) {
      const float more = matrix[static_cast<size_t>(i / 8 * kPitch + kColumn + i % 8)];
      CHECK(x.GetValue(i) == (i < kCount ? sums[i] + more : sums[i]));
    }
    // The result is a column of blocks, and the operands are contiguous.
    const BinaryRepeatParams to_column(kPitch / 8, 1, 1, kPitch, 8, 8);
    add(y, x, x, to_column);
    for (int32_t i = 0; i < kPitch * kRows; ++i) {
      const int32_t at = i / kPitch * 8 + i % kPitch;
      const bool written = i % kPitch < 8 && at < kCount;
      CHECK(y.GetValue(i) == (written ? 2 * x.GetValue(at) : matrix[i]));
    }
  });
  twin({"V, Add (", "src1 has 960 bytes, 980 are needed"}, [&](bool repaired, Ub& ub) {
    const auto x = local(ub, sums), y = local(ub, matrix);
    add(x, x, y[repaired ? 0 : kPitch], column);
  });
  twin({"V, Add (", "only the same tensor may be both"}, [&](bool repaired, Ub& ub) {
    const auto x = local(ub, sums), y = local(ub, matrix);
    add(repaired ? x : y, x, y, column);
  });
}

// A subnormal quotient is kept, because the documentation of A2 and A3 does not mention subnormal numbers.
void test_subnormal_quotient() {
  passes([](Ub& ub) {
    const auto x = ub.Alloc<float, 8>(), y = ub.Alloc<float, 8>();
    Duplicate(x, 0x1p-126f, 8);
    Duplicate(y, 4.0f, 8);
    PipeBarrier<PIPE_V>();
    Div(x, x, y, 8);
    order<HardEvent::V_S>();
    CHECK(x.GetValue(0) == 0x1p-128f);
  });
}

}  // namespace

int main() {
  test_arithmetic<float>();
  test_arithmetic<half>();
  test_arithmetic<int16_t>();
  test_arithmetic<int32_t>();
  test_functions<float>();
  test_functions<half>();
  test_coarse_functions<float>(1e-4f);
  test_coarse_functions<half>(1e-3f);
  test_integers_wrap();
  test_not_a_number();
  test_subnormal_quotient();
  test_axpy<float, float>();
  test_axpy<half, half>();
  test_axpy<float, half>();
  test_duplicate<float>(1.5f);
  test_duplicate<half>(half(1.5f));
  test_duplicate<bfloat16_t>(bfloat16_t(1.5f));
  test_duplicate<int16_t>(-3);
  test_duplicate<uint16_t>(3);
  test_duplicate<int32_t>(-3);
  test_duplicate<uint32_t>(3);
  test_reduce_sum<float>();
  test_reduce_sum<half>();
  test_gather();
  test_overlap();
  test_mask();
  test_strides();
  return check_result();
}
