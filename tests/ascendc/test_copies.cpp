// DataCopy and DataCopyPad against loops over bytes, and the limits of their arguments.
#include <cstring>

#include "support.h"

namespace {

using Kernel = std::function<void(bool)>;

struct Shape {
  uint16_t blocks;
  uint32_t bytes;
  uint32_t gm_stride;  // bytes
  uint32_t ub_stride;  // 32-byte blocks
};

constexpr Shape kShapes[] = {{1, 4, 0, 0},    {1, 32, 0, 0},  {1, 36, 0, 0}, {3, 64, 0, 0},
                             {3, 64, 20, 0},  {5, 12, 8, 0},  {5, 12, 0, 2}, {7, 100, 300, 3},
                             {100, 4, 60, 0}, {2, 8192, 4, 1}};

uint32_t rounded(uint32_t bytes) { return (bytes + 31) / 32 * 32; }

// In with one shape, and out again block by block from where it must lie.
void test_blocks_in() {
  for (const Shape& s : kShapes) {
    const size_t span = (s.blocks - 1) * (s.bytes + s.gm_stride) + s.bytes;
    Global<int32_t> in("in", span / 4 + 3, Access::kRead), out("out", s.blocks * s.bytes / 4, Access::kWrite);
    for (size_t i = 0; i < in.values.size(); ++i) in.values[i] = static_cast<int32_t>(i * 7);
    CHECK_PASSES(run(
        [&] {
          LocalMemAllocator<> allocator;
          const auto local = allocator.Alloc<int32_t, 16384>();
          DataCopyPad(local, in.tensor()[1], {s.blocks, s.bytes, s.gm_stride, s.ub_stride, 0},
                      {false, 0, 0, 0});
          order<HardEvent::MTE2_MTE3>();
          for (uint32_t i = 0; i < s.blocks; ++i) {
            const uint32_t at = i * (rounded(s.bytes) + s.ub_stride * 32) / 4;
            copy_out(out.tensor()[i * s.bytes / 4], local[at], s.bytes / 4);
          }
        },
        {in.buffer(), out.buffer()}));
    for (uint32_t i = 0; i < s.blocks; ++i) {
      const size_t from = 1 + i * (s.bytes + s.gm_stride) / 4;
      CHECK(std::memcmp(&out.values[i * s.bytes / 4], &in.values[from], s.bytes) == 0);
    }
  }
}

void test_blocks_out() {
  for (const Shape& s : kShapes) {
    const size_t span = (s.blocks - 1) * (s.bytes + s.gm_stride) + s.bytes;
    Global<int32_t> in("in", s.blocks * s.bytes / 4, Access::kRead);
    Global<int32_t> out("out", span / 4 + 3, Access::kReadWrite, -1);
    for (size_t i = 0; i < in.values.size(); ++i) in.values[i] = static_cast<int32_t>(i * 5);
    CHECK_PASSES(run(
        [&] {
          LocalMemAllocator<> allocator;
          const auto local = allocator.Alloc<int32_t, 16384>();
          for (uint32_t i = 0; i < s.blocks; ++i) {
            const uint32_t at = i * (rounded(s.bytes) + s.ub_stride * 32) / 4;
            copy_in(local[at], in.tensor()[i * s.bytes / 4], s.bytes / 4);
          }
          order<HardEvent::MTE2_MTE3>();
          DataCopyPad(out.tensor()[1], local, {s.blocks, s.bytes, s.ub_stride, s.gm_stride, 0});
        },
        {in.buffer(), out.buffer()}));
    std::vector<int32_t> expected(out.values.size(), -1);
    for (uint32_t i = 0; i < s.blocks; ++i) {
      std::memcpy(&expected[1 + i * (s.bytes + s.gm_stride) / 4], &in.values[i * s.bytes / 4], s.bytes);
    }
    CHECK(out.values == expected);
  }
}

// The bytes around a block of `count` values in local memory.
std::vector<int16_t> padded(uint32_t count, const DataCopyPadExtParams<int16_t>& padding, uint32_t total) {
  Global<int16_t> in("in", count, Access::kRead), out("out", total, Access::kWrite);
  for (uint32_t i = 0; i < count; ++i) in.values[i] = static_cast<int16_t>(i + 5);
  CHECK_PASSES(run(
      [&] {
        LocalMemAllocator<> allocator;
        const auto local = allocator.Alloc<int16_t, 64>();
        DataCopyPad(local, in.tensor(), {1, count * 2, 0, 0, 0}, padding);
        order<HardEvent::MTE2_MTE3>();
        copy_out(out.tensor(), local, total);
      },
      {in.buffer(), out.buffer()}));
  return out.values;
}

void test_padding() {
  // Without padding the first value is repeated, isPad or not.
  for (const bool is_pad : {false, true}) {
    const auto tail = padded(3, {is_pad, 0, 0, 9}, 16);
    for (int i = 0; i < 16; ++i) CHECK(tail[i] == (i < 3 ? i + 5 : 5));
  }
  const auto right = padded(3, {true, 0, 5, 9}, 16);
  for (int i = 0; i < 16; ++i) CHECK(right[i] == (i < 3 ? i + 5 : 9));
  const auto both = padded(4, {true, 2, 10, 9}, 16);
  for (int i = 0; i < 16; ++i) CHECK(both[i] == (i >= 2 && i < 6 ? i + 3 : 9));

  Global<int16_t> in("in", 16, Access::kRead), out("out", 16, Access::kReadWrite);
  const Kernel undefined = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<int16_t, 64>();
    DataCopyPad(local, in.tensor(), {1, 6, 0, 0, 0}, DataCopyPadExtParams<int16_t>{repaired, 0, 5, 0});
    order<HardEvent::MTE2_MTE3>();
    copy_out(out.tensor(), local, 4);
  };
  CHECK_TWIN(undefined, (std::vector<Buffer>{in.buffer(), out.buffer()}), 1, "byte 6 holds no data");
  const Kernel too_much = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<int16_t, 64>();
    const auto left = static_cast<uint8_t>(repaired ? 16 : 17);
    DataCopyPad(local, in.tensor(), {1, 6, 0, 0, 0}, DataCopyPadExtParams<int16_t>{true, left, 5, 0});
  };
  CHECK_TWIN(too_much, {in.buffer()}, 1, "17 elements on the left", "at most 32 bytes");
  Global<int64_t> wide("wide", 16, Access::kRead);
  const Kernel wide_value = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<int64_t, 64>();
    DataCopyPad(local, wide.tensor(), {1, 8, 0, 0, 0},
                DataCopyPadExtParams<int64_t>{true, 0, 1, repaired ? 0 : 1});
  };
  CHECK_TWIN(wide_value, {wide.buffer()}, 1, "paddingValue of a 64-bit type must be 0");
}

void test_limits() {
  Global<float> in("in", 600000, Access::kRead), out("out", 600000, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  const Kernel too_many_blocks = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<float, 40000>();
    const auto blocks = static_cast<uint16_t>(repaired ? 4095 : 4096);
    DataCopyPad(local, in.tensor(), {blocks, 4, 0, 0, 0}, {false, 0, 0, 0.0f});
  };
  CHECK_TWIN(too_many_blocks, buffers, 1, "blockCount 4096: 0 to 4095");
  const Kernel too_long = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<float, 40000>();
    DataCopyPad(local, in.tensor(), {1, repaired ? 4u : 2097152u, 0, 0, 0}, {false, 0, 0, 0.0f});
  };
  CHECK_TWIN(too_long, buffers, 1, "blockLen 2097152 bytes: 0 to 2097151");
  const Kernel length_in_elements = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<float, 64>();
    DataCopyPad(local, in.tensor(), {1, repaired ? 40u : 10u, 0, 0, 0}, {false, 0, 0, 0.0f});
  };
  CHECK_TWIN(length_in_elements, buffers, 1,
             "blockLen 10 is in bytes and must be a multiple of the element's 4");
  const Kernel past_the_tensor = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<float, 64>();
    DataCopyPad(local, in.tensor(), {2, 68, 0, repaired ? 2u : 3u, 0}, {false, 0, 0, 0.0f});
  };
  CHECK_TWIN(past_the_tensor, buffers, 1, "dst has 256 bytes, 288 are needed");
  const Kernel out_past_the_tensor = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<float, 64>();
    Duplicate(local, 1.0f, 64);
    order<HardEvent::V_MTE3>();
    DataCopyPad(out.tensor(), local, {2, 128, repaired ? 0u : 1u, 0, 0});
  };
  CHECK_TWIN(out_past_the_tensor, buffers, 1, "src has 256 bytes, 288 are needed");
  // Nothing to do is allowed.
  CHECK_PASSES(run(
      [&] {
        LocalMemAllocator<> allocator;
        const auto local = allocator.Alloc<float, 64>();
        DataCopyPad(local, in.tensor(), {0, 4, 0, 0, 0}, {false, 0, 0, 0.0f});
        DataCopyPad(out.tensor(), local, {4, 0, 0, 0, 0});
      },
      buffers));
}

void test_data_copy() {
  Global<half> in("in", 64, Access::kRead), out("out", 64, Access::kReadWrite);
  for (int i = 0; i < 64; ++i) in.values[i].bits = static_cast<uint16_t>(i);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  const Kernel rounds_down = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<half, 64>();
    DataCopy(local, in.tensor(), repaired ? 64 : 63);
    order<HardEvent::MTE2_MTE3>();
    DataCopy(out.tensor(), local, 64);
  };
  CHECK_TWIN(rounds_down, buffers, 1, "MTE2, DataCopy", "126 bytes: DataCopy rounds down");
  CHECK(std::memcmp(in.values.data(), out.values.data(), 128) == 0);
  const Kernel rounds_down_out = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto local = allocator.Alloc<half, 64>();
    DataCopy(local, in.tensor(), DataCopyParams(2, 2, 0, 0));
    order<HardEvent::MTE2_MTE3>();
    DataCopy(out.tensor(), local, repaired ? 16 : 17);
  };
  CHECK_TWIN(rounds_down_out, buffers, 1, "MTE3, DataCopy", "34 bytes: DataCopy rounds down");
  const Kernel odd_address = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    GlobalTensor<half> tensor;
    auto* bytes = reinterpret_cast<uint8_t*>(in.values.data()) + (repaired ? 2 : 1);
    tensor.SetGlobalBuffer(reinterpret_cast<half*>(bytes), 32);
    DataCopy(allocator.Alloc<half, 64>(), tensor, 16);
  };
  CHECK_TWIN(odd_address, buffers, 1, "for DataCopy it must be a multiple of the element's 2 bytes");
  // Two blocks of 32 bytes, 32 bytes apart in global memory, next to each other in local memory.
  CHECK_PASSES(run(
      [&] {
        LocalMemAllocator<> allocator;
        const auto local = allocator.Alloc<half, 64>();
        DataCopy(local, in.tensor(), DataCopyParams(2, 1, 1, 0));
        order<HardEvent::MTE2_MTE3>();
        DataCopy(out.tensor(), local, 32);
      },
      buffers));
  for (int i = 0; i < 32; ++i) CHECK(out.values[i].bits == (i < 16 ? i : i + 16));
}

// Tensors of a pipe keep their position.
void test_positions() {
  Global<float> in("in", 64, Access::kRead, 2.0f), out("out", 64, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  const auto through = [&](auto scratch) {
    TPipe pipe;
    pipe.InitBuffer(scratch, 256);
    const LocalTensor<float> local = scratch.template Get<float>();
    copy_in(local, in.tensor(), 64);
    order<HardEvent::MTE2_MTE3>();
    copy_out(out.tensor(), local, 64);
  };
  const Kernel arrives = [&](bool repaired) {
    repaired ? through(TBuf<TPosition::VECIN>()) : through(TBuf<TPosition::VECCALC>());
  };
  CHECK_TWIN(arrives, buffers, 1, "MTE2, DataCopyPad", "a tensor at VECCALC: on A2 and A3 copies come to");
  const Kernel leaves = [&](bool repaired) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> calc;
    TBuf<TPosition::VECOUT> outgoing;
    pipe.InitBuffer(calc, 256);
    pipe.InitBuffer(outgoing, 256);
    const LocalTensor<float> local = repaired ? outgoing.Get<float>() : calc.Get<float>();
    Duplicate(local, 1.0f, 64);
    order<HardEvent::V_MTE3>();
    copy_out(out.tensor(), local, 64);
  };
  CHECK_TWIN(leaves, buffers, 1, "MTE3, DataCopyPad",
             "a tensor at VECCALC: copies go from VECIN and VECOUT only");
}

}  // namespace

int main() {
  test_positions();
  test_blocks_in();
  test_blocks_out();
  test_padding();
  test_limits();
  test_data_copy();
  return check_result();
}
