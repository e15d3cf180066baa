// Tests of local memory: its allocation, the tensors that kernels may use, and the bytes that hold data.
#include "emulator/ascendc/soc.h"
#include "support.h"

namespace {

void test_capacity() {
  const auto all = static_cast<uint32_t>(rec_sdk::emulator::soc().ub_free_bytes);
  CHECK(all == 188160);
  twin({"S, InitBuffer", "188192 bytes", "Ascend910B1 leaves a kernel 188160 bytes"},
       [&](bool repaired, TPipe& pipe) {
         TBuf<> buffer;
         pipe.InitBuffer(buffer, repaired ? all : all + 1);
       });
  twin({"after 32 bytes", "188160"}, [&](bool repaired, TPipe& pipe) {
    TBuf<> buffer;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(buffer, 32);
    pipe.InitBuffer(queue, 2, repaired ? all / 2 - 32 : all / 2);
  });
  twin({"LocalMemAllocator::Alloc", "188160"}, [&](bool repaired) {
    LocalMemAllocator<Hardware::UB> ub;
    ub.Alloc<float, 8>();
    ub.Alloc<float>(repaired ? all / 4 - 8 : all / 4);
  });
}

void test_number_of_buffers() {
  twin({"1 buffers after 64: a kernel has 64 at most"}, [](bool repaired, TPipe& pipe) {
    TQue<TPosition::VECIN, 1> queue;
    TBuf<> buffer;
    pipe.InitBuffer(queue, repaired ? 63 : 64, 32);
    pipe.InitBuffer(buffer, 32);
  });
  twin({"0 buffers of 32 bytes: at least 1 of each"}, [](bool repaired, TPipe& pipe) {
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, repaired ? 1 : 0, 32);
  });
  twin({"1 buffers of 0 bytes"}, [](bool repaired, TPipe& pipe) {
    TBuf<> buffer;
    pipe.InitBuffer(buffer, repaired ? 1 : 0);
  });
  passes([](TPipe& pipe) {
    TBuf<> odd, next;
    pipe.InitBuffer(odd, 33);
    pipe.InitBuffer(next, 32);
    CHECK(odd.Get<float>().GetSize() == 16);
    CHECK(next.Get<float>().GetPhyAddr() == 64);
  });
}

void test_reset_and_pipes() {
  twin({"dst is a tensor at local address 0 that was freed"}, [](bool repaired, TPipe& pipe) {
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 64);
    LocalTensor<float> tensor = buffer.Get<float>();
    pipe.Reset();
    pipe.InitBuffer(buffer, 64);
    if (repaired) tensor = buffer.Get<float>();
    Duplicate(tensor, 1.0f, 16);
  });
  twin({"or was never allocated"}, [](bool repaired, Ub& ub) {
    LocalTensor<float> tensor;
    if (repaired) tensor = ub.Alloc<float, 16>();
    Duplicate(tensor, 1.0f, 16);
  });
  twin({"a second TPipe"}, [](bool repaired) {
    TPipe first;
    if (repaired) first.Destroy();
    TPipe second;
  });
  twin({"the TPipe was destroyed"}, [](bool repaired, TPipe& pipe) {
    TBuf<> buffer;
    if (!repaired) pipe.Destroy();
    pipe.InitBuffer(buffer, 32);
  });
  twin({"a TPipe cannot be used together with LocalMemAllocator"}, [](bool repaired, Ub& ub) {
    if (!repaired) ub.Alloc<float, 8>();
    TPipe pipe;
  });
  twin({"LocalMemAllocator cannot be used together with a TPipe"}, [](bool repaired, TPipe& pipe) {
    Ub ub;
    if (repaired) pipe.Destroy();
    ub.Alloc<float, 8>();
  });
  twin({"the TBuf has no memory"}, [](bool repaired, TPipe& pipe) {
    TBuf<> buffer;
    if (repaired) pipe.InitBuffer(buffer, 32);
    buffer.Get<float>();
  });
}

void test_parts_of_a_buffer() {
  twin({"TBuf::Get", "28 bytes", "a multiple of 32"}, [](bool repaired, TPipe& pipe) {
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 64);
    CHECK(buffer.Get<float>(repaired ? 8 : 7).GetSize() == 8);
  });
  twin({"64 bytes from byte 32 of a TBuf of 64"}, [](bool repaired, TPipe& pipe) {
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 64);
    buffer.GetWithOffset<float>(repaired ? 8 : 16, 32);
  });
}

void test_bounds_of_tensors() {
  twin({"V, Duplicate", "dst has 64 bytes, 68 are needed"}, [](bool repaired, Ub& ub) {
    const auto tensor = ub.Alloc<float, 16>();
    Duplicate(tensor, 1.0f, repaired ? 16 : 17);
  });
  twin({"src0 has 32 bytes, 64 are needed"}, [](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 16>(), y = ub.Alloc<float, 24>();
    Duplicate(x, 1.0f, 16);
    PipeBarrier<PIPE_V>();
    Adds(y, x[repaired ? 0 : 8], 1.0f, 16);
  });
  twin({"LocalTensor[]", "offset 17 of a tensor of 16 elements"}, [](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 16>();
    CHECK(x[repaired ? 16 : 17].GetSize() == 0);
  });
  twin({"LocalTensor::SetValue", "64 bytes, 68 are needed"}, [](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 16>();
    x.SetValue(repaired ? 15 : 16, 1.0f);
  });
  twin({"80 bytes of a tensor of 64"}, [](bool repaired, Ub& ub) {
    auto x = ub.Alloc<float, 16>();
    x.SetSize(repaired ? 4 : 20);
    CHECK(x.GetSize() == 4);
  });
}

void test_alignment() {
  Global<float> in("in", 64, Access::kRead, 1.0f), out("out", 64, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  twin({"dst starts at local address 16: it must be a multiple of 32"}, [](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 32>();
    Duplicate(x[repaired ? 8 : 4], 1.0f, 8);
  });
  twin({"src1 starts at local address 36"}, [](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 32>(), y = ub.Alloc<float, 32>();
    Duplicate(x, 1.0f, 32);
    PipeBarrier<PIPE_V>();
    Add(y, x, x[repaired ? 8 : 9], 8);
  });
  twin({"MTE2, DataCopyPad", "dst starts at local address 4"}, buffers, [&](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 32>();
    copy_in(x[repaired ? 8 : 1], in.tensor(), 4);
  });
  twin({"MTE3, DataCopyPad", "src starts at local address 8"}, buffers, [&](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 32>();
    Duplicate(x, 1.0f, 32);
    order<HardEvent::V_MTE3>();
    copy_out(out.tensor(), x[repaired ? 8 : 2], 4);
  });
}

void test_unwritten_bytes() {
  Global<float> in("in", 64, Access::kRead, 1.0f), out("out", 64, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  twin({"byte 40 holds no data"}, [](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 32>(), y = ub.Alloc<float, 32>();
    Duplicate(x, 1.0f, repaired ? 11 : 10);
    PipeBarrier<PIPE_V>();
    Adds(y, x, 1.0f, 11);
  });
  twin({"MTE3", "byte 96 holds no data"}, buffers, [&](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 32>();
    Duplicate(x, 1.0f, repaired ? 32 : 24);
    order<HardEvent::V_MTE3>();
    copy_out(out.tensor(), x, 32);
  });
  twin({"byte 8 holds no data"}, [](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 32>();
    if (repaired) x.SetValue(2, 1.0f);
    x.SetValue(3, 1.0f);
    x.GetValue(2);
  });
  // A newly allocated tensor of a queue holds no data, even if its memory held data before.
  twin({"V, Adds", "byte 0 holds no data"}, buffers, [&](bool repaired, TPipe& pipe) {
    TQue<TPosition::VECIN, 1> queue;
    TBuf<> sums;
    pipe.InitBuffer(queue, 1, 64);
    pipe.InitBuffer(sums, 64);
    for (int i = 0; i < 2; ++i) {
      auto tensor = queue.AllocTensor<float>();
      if (i == 0 || repaired) copy_in(tensor, in.tensor(), 16);
      queue.EnQue(tensor);
      tensor = queue.DeQue<float>();
      Adds(sums.Get<float>(), tensor, 1.0f, 16);
      PipeBarrier<PIPE_V>();
      queue.FreeTensor(tensor);
    }
  });
}

// The local memory of a core holds no data of an earlier core.
void test_cores_start_empty() {
  twin({"byte 0 holds no data"}, {{}, 2}, [](bool repaired, Ub& ub) {
    const auto x = ub.Alloc<float, 32>(), y = ub.Alloc<float, 32>();
    static int runs = 0;
    if (runs++ == 0 || repaired) Duplicate(x, 1.0f, 32);
    PipeBarrier<PIPE_V>();
    Adds(y, x, 1.0f, 32);
  });
}

}  // namespace

int main() {
  test_capacity();
  test_number_of_buffers();
  test_reset_and_pipes();
  test_parts_of_a_buffer();
  test_bounds_of_tensors();
  test_alignment();
  test_unwritten_bytes();
  test_cores_start_empty();
  return check_result();
}
