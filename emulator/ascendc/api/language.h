// The keywords that bisheng adds to C++, and CANN's names for the parts of the chip.
#pragma once

#include <cstdint>

#include "emulator/chips.h"

// 2201 is the generation of 910B and 910_93 (A2, A3); 3510 is the generation of 950 (A5).
static_assert(REC_SDK_ASCENDC_ARCH == 2201 || REC_SDK_ASCENDC_ARCH == 3510,
              "REC_SDK_ASCENDC_ARCH must be 2201 or 3510");
#ifndef __NPU_ARCH__
#define __NPU_ARCH__ REC_SDK_ASCENDC_ARCH
#endif

#define __aicore__
#define __gm__
#define __ubuf__
#define __global__
#define __vector__
#define __mix__(cube, vector)
#define __schedmode__(mode)
#define GM_ADDR uint8_t*

enum pipe_t {
  PIPE_S = 0,
  PIPE_V,
  PIPE_M,
  PIPE_MTE1,
  PIPE_MTE2,
  PIPE_MTE3,
  PIPE_ALL,
  PIPE_FIX = 10,
};

enum event_t {
  EVENT_ID0 = 0,
  EVENT_ID1,
  EVENT_ID2,
  EVENT_ID3,
  EVENT_ID4,
  EVENT_ID5,
  EVENT_ID6,
  EVENT_ID7,
};

namespace AscendC {

enum class TPosition : uint8_t {
  GM,
  A1,
  A2,
  B1,
  B2,
  C1,
  C2,
  CO1,
  CO2,
  VECIN,
  VECOUT,
  VECCALC,
  LCM = VECCALC,
  SPM,
  SHM = SPM,
  TSCM,
  C2PIPE2GM,
  C2PIPE2LOCAL,
  MAX,
};
using QuePosition = TPosition;

enum class Hardware : uint8_t { GM, UB, L1, L0A, L0B, L0C, BIAS, FIXBUF, MAX };

using TEventID = int8_t;

constexpr uint32_t TOTAL_UB_SIZE = REC_SDK_ASCENDC_ARCH == 2201 ? 192 * 1024 : 248 * 1024;
constexpr int32_t ONE_BLK_SIZE = 32;

// Whether T is one of the types `Others`. Used to check the types that an instruction accepts.
template <class T, class... Others>
constexpr bool kOneOf = (__is_same(T, Others) || ...);

}  // namespace AscendC
