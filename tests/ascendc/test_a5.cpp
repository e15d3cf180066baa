// The 950 (A5) differs in these: compiled for arch 3510, run with REC_SDK_EMULATED_SOC=Ascend950PR_9589.
#include "emulator/ascendc/soc.h"
#include "support.h"

namespace {

using Kernel = std::function<void(bool)>;

void test_sizes() {
  CHECK(rec_sdk::emulator::soc().arch == 3510);
  CHECK(rec_sdk::emulator::soc().vector_cores == 64);
  CHECK_PASSES(run([] {
    TPipe pipe;
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 253952);
  }));
}

void test_nothing_to_do() {
  const Kernel kernel = [](bool repaired) {
    LocalMemAllocator<> allocator;
    Duplicate(allocator.Alloc<float, 8>(), 1.0f, repaired ? 1 : 0);
  };
  CHECK_TWIN(kernel, {}, 1, "V, Duplicate", "count 0: only A2 and A3 do nothing then");
}

void test_strides() {
  Global<float> in("in", 64, Access::kRead, 2.0f), out("out", 64, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  // The same block again and again.
  const Kernel backwards = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<float, 64>();
    DataCopyPad(local, in.tensor()[8], {3, 32, repaired ? -32 : -36, 0, 0}, {false, 0, 0, 0.0f});
  };
  CHECK_TWIN(backwards, buffers, 1, "strides of -36 bytes", "from -blockLen on");
  const Kernel wide = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<float, 64>();
    DataCopyPad(local, in.tensor(), {1, 32, 0, repaired ? 65535 : 65536, 0}, {false, 0, 0, 0.0f});
  };
  CHECK_TWIN(wide, buffers, 1, "65536 blocks in local memory");
}

// The index of an element of 16 bits has 16 bits; srcBaseOffset reaches further.
void test_gather() {
  const Kernel kernel = [](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto values = allocator.Alloc<half, 70000>();
    const auto at = allocator.Alloc<uint32_t, 8>();
    Duplicate(values, half(1.0f), 70000);
    at.SetValue(0, repaired ? 131070u : 131072u);
    order<HardEvent::S_V>();
    PipeBarrier<PIPE_V>();
    Gather(allocator.Alloc<half, 16>(), values, at, 4, 1);
  };
  CHECK_TWIN(kernel, {}, 1, "srcOffset[0] of Gather (V, ",
             "is 131072: for 16-bit elements 950 reaches 131071");
}

// One mask, all instructions: those with a scalar ask it in the form with strides.
void test_mask() {
  CHECK_PASSES(run([] {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 128>();
    Duplicate(x, 3.0f, 128);
    PipeBarrier<PIPE_V>();
    SetMaskCount();
    SetVectorMask<float, MaskMode::COUNTER>(100);
    Muls<float, false>(x, x, 2.0f, MASK_PLACEHOLDER, 1, {1, 1, 8, 8});
    SetMaskNorm();
    ResetMask();
    order<HardEvent::V_S>();
    for (uint32_t i = 0; i < 128; ++i) CHECK(x.GetValue(i) == (i < 100 ? 6.0f : 3.0f));
  }));
}

// A copy may come to VECCALC here.
void test_positions() {
  Global<float> in("in", 64, Access::kRead, 2.0f);
  CHECK_PASSES(run(
      [&] {
        TPipe pipe;
        TBuf<TPosition::VECCALC> buffer;
        pipe.InitBuffer(buffer, 256);
        copy_in(buffer.Get<float>(), in.tensor(), 64);
      },
      {in.buffer()}));
}

}  // namespace

int main() {
  test_sizes();
  test_nothing_to_do();
  test_strides();
  test_gather();
  test_mask();
  test_positions();
  return check_result();
}
