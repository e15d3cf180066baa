// Local memory: what is set aside, which kernel may use it, and which of its bytes hold data.
#include "emulator/ascendc/soc.h"
#include "support.h"

namespace {

using Kernel = std::function<void(bool)>;

void test_capacity() {
  const auto all = static_cast<uint32_t>(rec_sdk::emulator::soc().ub_free_bytes);
  CHECK(all == 188160);
  const Kernel scratch_too_large = [&](bool repaired) {
    TPipe pipe;
    TBuf<> buffer;
    pipe.InitBuffer(buffer, repaired ? all : all + 1);
  };
  CHECK_TWIN(scratch_too_large, {}, 1, "S, InitBuffer", "188192 bytes",
             "Ascend910B1 leaves a kernel 188160 bytes");
  const Kernel queue_too_large = [&](bool repaired) {
    TPipe pipe;
    TBuf<> buffer;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(buffer, 32);
    pipe.InitBuffer(queue, 2, repaired ? all / 2 - 32 : all / 2);
  };
  CHECK_TWIN(queue_too_large, {}, 1, "after 32 bytes", "188160");
  const Kernel static_too_large = [&](bool repaired) {
    LocalMemAllocator<Hardware::UB> allocator;
    allocator.Alloc<float, 8>();
    allocator.Alloc<float>(repaired ? all / 4 - 8 : all / 4);
  };
  CHECK_TWIN(static_too_large, {}, 1, "LocalMemAllocator::Alloc", "188160");
}

void test_number_of_buffers() {
  const Kernel too_many = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    TBuf<> buffer;
    pipe.InitBuffer(queue, repaired ? 63 : 64, 32);
    pipe.InitBuffer(buffer, 32);
  };
  CHECK_TWIN(too_many, {}, 1, "1 buffers after 64: a kernel has 64 at most");
  const Kernel none = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, repaired ? 1 : 0, 32);
  };
  CHECK_TWIN(none, {}, 1, "0 buffers of 32 bytes: at least 1 of each");
  const Kernel empty = [](bool repaired) {
    TPipe pipe;
    TBuf<> buffer;
    pipe.InitBuffer(buffer, repaired ? 1 : 0);
  };
  CHECK_TWIN(empty, {}, 1, "1 buffers of 0 bytes");
  CHECK_PASSES(run([] {
    TPipe pipe;
    TBuf<> odd, next;
    pipe.InitBuffer(odd, 33);
    pipe.InitBuffer(next, 32);
    CHECK(odd.Get<float>().GetSize() == 16);
    CHECK(next.Get<float>().GetPhyAddr() == 64);
  }));
}

void test_reset_and_pipes() {
  const Kernel old_tensor = [](bool repaired) {
    TPipe pipe;
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 64);
    LocalTensor<float> tensor = buffer.Get<float>();
    pipe.Reset();
    pipe.InitBuffer(buffer, 64);
    if (repaired) tensor = buffer.Get<float>();
    Duplicate(tensor, 1.0f, 16);
  };
  CHECK_TWIN(old_tensor, {}, 1, "dst is a tensor at local address 0 that was freed");
  const Kernel no_tensor = [](bool repaired) {
    LocalMemAllocator<> allocator;
    LocalTensor<float> tensor;
    if (repaired) tensor = allocator.Alloc<float, 16>();
    Duplicate(tensor, 1.0f, 16);
  };
  CHECK_TWIN(no_tensor, {}, 1, "or was never allocated");
  const Kernel two_pipes = [](bool repaired) {
    TPipe first;
    if (repaired) first.Destroy();
    TPipe second;
  };
  CHECK_TWIN(two_pipes, {}, 1, "a second TPipe");
  const Kernel after_destroy = [](bool repaired) {
    TPipe pipe;
    TBuf<> buffer;
    if (!repaired) pipe.Destroy();
    pipe.InitBuffer(buffer, 32);
  };
  CHECK_TWIN(after_destroy, {}, 1, "the TPipe was destroyed");
  const Kernel mixed = [](bool repaired) {
    LocalMemAllocator<> allocator;
    if (!repaired) allocator.Alloc<float, 8>();
    TPipe pipe;
  };
  CHECK_TWIN(mixed, {}, 1, "a TPipe cannot be used together with LocalMemAllocator");
  const Kernel mixed_too = [](bool repaired) {
    TPipe pipe;
    LocalMemAllocator<> allocator;
    if (repaired) pipe.Destroy();
    allocator.Alloc<float, 8>();
  };
  CHECK_TWIN(mixed_too, {}, 1, "LocalMemAllocator cannot be used together with a TPipe");
  const Kernel no_init = [](bool repaired) {
    TPipe pipe;
    TBuf<> buffer;
    if (repaired) pipe.InitBuffer(buffer, 32);
    buffer.Get<float>();
  };
  CHECK_TWIN(no_init, {}, 1, "the TBuf has no memory");
}

void test_parts_of_a_buffer() {
  const Kernel odd_length = [](bool repaired) {
    TPipe pipe;
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 64);
    CHECK(buffer.Get<float>(repaired ? 8 : 7).GetSize() == 8);
  };
  CHECK_TWIN(odd_length, {}, 1, "TBuf::Get", "28 bytes", "a multiple of 32");
  const Kernel too_long = [](bool repaired) {
    TPipe pipe;
    TBuf<> buffer;
    pipe.InitBuffer(buffer, 64);
    buffer.GetWithOffset<float>(repaired ? 8 : 16, 32);
  };
  CHECK_TWIN(too_long, {}, 1, "64 bytes from byte 32 of a TBuf of 64");
}

void test_bounds_of_tensors() {
  const Kernel dst_too_short = [](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto tensor = allocator.Alloc<float, 16>();
    Duplicate(tensor, 1.0f, repaired ? 16 : 17);
  };
  CHECK_TWIN(dst_too_short, {}, 1, "V, Duplicate", "dst has 64 bytes, 68 are needed");
  const Kernel src_too_short = [](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 16>(), y = allocator.Alloc<float, 24>();
    Duplicate(x, 1.0f, 16);
    PipeBarrier<PIPE_V>();
    Adds(y, x[repaired ? 0 : 8], 1.0f, 16);
  };
  CHECK_TWIN(src_too_short, {}, 1, "src0 has 32 bytes, 64 are needed");
  const Kernel offset_too_large = [](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 16>();
    CHECK(x[repaired ? 16 : 17].GetSize() == 0);
  };
  CHECK_TWIN(offset_too_large, {}, 1, "LocalTensor[]", "offset 17 of a tensor of 16 elements");
  const Kernel value_beyond = [](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 16>();
    x.SetValue(repaired ? 15 : 16, 1.0f);
  };
  CHECK_TWIN(value_beyond, {}, 1, "LocalTensor::SetValue", "64 bytes, 68 are needed");
  const Kernel resized = [](bool repaired) {
    LocalMemAllocator<> allocator;
    auto x = allocator.Alloc<float, 16>();
    x.SetSize(repaired ? 4 : 20);
    CHECK(x.GetSize() == 4);
  };
  CHECK_TWIN(resized, {}, 1, "80 bytes of a tensor of 64");
}

void test_alignment() {
  Global<float> in("in", 64, Access::kRead, 1.0f), out("out", 64, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  const Kernel vector_dst = [](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 32>();
    Duplicate(x[repaired ? 8 : 4], 1.0f, 8);
  };
  CHECK_TWIN(vector_dst, {}, 1, "dst starts at local address 16: it must be a multiple of 32");
  const Kernel vector_src = [](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 32>(), y = allocator.Alloc<float, 32>();
    Duplicate(x, 1.0f, 32);
    PipeBarrier<PIPE_V>();
    Add(y, x, x[repaired ? 8 : 9], 8);
  };
  CHECK_TWIN(vector_src, {}, 1, "src1 starts at local address 36");
  const Kernel copy_dst = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 32>();
    copy_in(x[repaired ? 8 : 1], in.tensor(), 4);
  };
  CHECK_TWIN(copy_dst, buffers, 1, "MTE2, DataCopyPad", "dst starts at local address 4");
  const Kernel copy_src = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 32>();
    Duplicate(x, 1.0f, 32);
    order<HardEvent::V_MTE3>();
    copy_out(out.tensor(), x[repaired ? 8 : 2], 4);
  };
  CHECK_TWIN(copy_src, buffers, 1, "MTE3, DataCopyPad", "src starts at local address 8");
}

void test_unwritten_bytes() {
  Global<float> in("in", 64, Access::kRead, 1.0f), out("out", 64, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  const Kernel vector_reads = [](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 32>(), y = allocator.Alloc<float, 32>();
    Duplicate(x, 1.0f, repaired ? 11 : 10);
    PipeBarrier<PIPE_V>();
    Adds(y, x, 1.0f, 11);
  };
  CHECK_TWIN(vector_reads, {}, 1, "byte 40 holds no data");
  const Kernel copy_reads = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 32>();
    Duplicate(x, 1.0f, repaired ? 32 : 24);
    order<HardEvent::V_MTE3>();
    copy_out(out.tensor(), x, 32);
  };
  CHECK_TWIN(copy_reads, buffers, 1, "MTE3", "byte 96 holds no data");
  const Kernel scalar_reads = [](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 32>();
    if (repaired) x.SetValue(2, 1.0f);
    x.SetValue(3, 1.0f);
    x.GetValue(2);
  };
  CHECK_TWIN(scalar_reads, {}, 1, "byte 8 holds no data");
  // A tensor of a queue starts without data, whatever its memory held before.
  const Kernel second_use = [&](bool repaired) {
    TPipe pipe;
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
  };
  CHECK_TWIN(second_use, buffers, 1, "V, Adds", "byte 0 holds no data");
}

// Nothing of a core's memory is there for the next one.
void test_cores_start_empty() {
  const Kernel kernel = [](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto x = allocator.Alloc<float, 32>(), y = allocator.Alloc<float, 32>();
    static int runs = 0;
    if (runs++ == 0 || repaired) Duplicate(x, 1.0f, 32);
    PipeBarrier<PIPE_V>();
    Adds(y, x, 1.0f, 32);
  };
  CHECK_TWIN(kernel, {}, 2, "byte 0 holds no data");
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
