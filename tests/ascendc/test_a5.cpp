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

}  // namespace

int main() {
  test_sizes();
  test_nothing_to_do();
  test_strides();
  return check_result();
}
