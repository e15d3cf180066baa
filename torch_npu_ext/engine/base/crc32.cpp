#include "torch_npu_ext/engine/base/crc32.h"

#include <array>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rec_sdk {
namespace {

constexpr uint32_t kPolynomial =
    0xedb88320;  // bits in reversed order: the highest bit is the coefficient of x^0

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ ((rest & 1) != 0 ? kPolynomial : 0);
    table[byte] = rest;
  }
  return table;
}

// Computes the checksum byte by byte. `state` and the result are checksums with all bits inverted.
uint32_t by_bytes(const uint8_t* data, size_t size, uint32_t state) {
  static constexpr std::array<uint32_t, 256> kTable = make_table();
  for (size_t i = 0; i < size; ++i) state = state >> 8 ^ kTable[(state ^ data[i]) & 0xff];
  return state;
}

#if defined(__x86_64__)

// Returns x^power modulo the polynomial, with its bits in reversed order, as a factor of carry-less
// multiplications.
constexpr int64_t remainder_of(int power) {
  uint32_t rest = uint32_t{1} << 31;  // x^0
  for (int i = 0; i < power; ++i) rest = rest >> 1 ^ ((rest & 1) != 0 ? kPolynomial : 0);
  return static_cast<int64_t>(uint64_t{rest} << 1);
}

// Multiplies 16 bytes by powers of x and adds them to 16 later bytes, which does not change the checksum:
// Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction, Intel 2009.
__attribute__((target("pclmul,sse4.1"))) __m128i folded(__m128i bytes, __m128i by, __m128i onto) {
  const __m128i low = _mm_clmulepi64_si128(bytes, by, 0x00), high = _mm_clmulepi64_si128(bytes, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

template <int distance>
__m128i factors() {
  constexpr int64_t low = remainder_of(distance + 32), high = remainder_of(distance - 32);
  return _mm_set_epi64x(high, low);
}

// Computes the checksum by folding. Precondition: size >= 64.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_folding(const uint8_t* data, size_t size,
                                                             uint32_t state) {
  const auto load = [&data] {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
    data += 16;
    return bytes;
  };
  const __m128i far = factors<512>(), near = factors<128>();
  __m128i a = _mm_xor_si128(load(), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = load(), c = load(), d = load();
  for (size -= 64; size >= 64; size -= 64) {
    a = folded(a, far, load());
    b = folded(b, far, load());
    c = folded(c, far, load());
    d = folded(d, far, load());
  }
  a = folded(folded(folded(a, near, b), near, c), near, d);
  for (; size >= 16; size -= 16) a = folded(a, near, load());
  alignas(16) uint8_t rest[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), a);
  return by_bytes(data, size, by_bytes(rest, sizeof rest, 0));
}

#endif

}  // namespace

bool has_carryless_multiplication() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
  return has;
#else
  return false;
#endif
}

uint32_t crc32(const void* data, size_t size, uint32_t before) {
  const auto* const bytes = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (size >= 64 && has_carryless_multiplication()) return ~by_folding(bytes, size, ~before);
#endif
  return ~by_bytes(bytes, size, ~before);
}

}  // namespace rec_sdk
