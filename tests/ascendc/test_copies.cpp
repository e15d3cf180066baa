// Compares DataCopy and DataCopyPad with loops over bytes, and tests the limits of their arguments.
#include "support.h"

namespace {

struct Shape {
  uint16_t blocks;
  uint32_t bytes;
  uint32_t gm_stride;  // bytes
  uint32_t ub_stride;  // 32-byte blocks

  // The offset of a block in global and in local memory, in elements.
  uint32_t in_gm(uint32_t block) const { return 1 + block * (bytes + gm_stride) / 4; }
  uint32_t in_ub(uint32_t block) const { return block * ((bytes + 31) / 32 * 32 + ub_stride * 32) / 4; }
  size_t span() const { return in_gm(blocks - 1u) + bytes / 4 + 2; }
};

constexpr Shape kShapes[] = {{1, 4, 0, 0},    {1, 32, 0, 0},  {1, 36, 0, 0}, {3, 64, 0, 0},
                             {3, 64, 20, 0},  {5, 12, 8, 0},  {5, 12, 0, 2}, {7, 100, 300, 3},
                             {100, 4, 60, 0}, {2, 8192, 4, 1}};

// Fills an array with multiples of `step`.
template <class T>
void count_up(Global<T>* values, int step) {
  for (size_t i = 0; i < values->values.size(); ++i) values->values[i] = static_cast<T>(i * step);
}

// Copies all blocks of a shape in at once, then each block out from the address where it is expected.
void test_blocks_in(const Shape& s) {
  Global<int32_t> in("in", s.span(), Access::kRead), out("out", s.blocks * s.bytes / 4, Access::kWrite);
  count_up(&in, 7);
  passes({in.buffer(), out.buffer()}, [&](Ub& ub) {
    const auto local = ub.Alloc<int32_t, 16384>();
    DataCopyPad(local, in.tensor()[1], {s.blocks, s.bytes, s.gm_stride, s.ub_stride, 0}, {false, 0, 0, 0});
    order<HardEvent::MTE2_MTE3>();
    for (uint32_t i = 0; i < s.blocks; ++i) {
      copy_out(out.tensor()[i * s.bytes / 4], local[s.in_ub(i)], s.bytes / 4);
    }
  });
  for (uint32_t i = 0; i < s.blocks; ++i) {
    CHECK(std::memcmp(&out.values[i * s.bytes / 4], &in.values[s.in_gm(i)], s.bytes) == 0);
  }
}

void test_blocks_out(const Shape& s) {
  Global<int32_t> in("in", s.blocks * s.bytes / 4, Access::kRead);
  Global<int32_t> out("out", s.span(), Access::kReadWrite, -1);
  count_up(&in, 5);
  std::vector<int32_t> expected = out.values;
  passes({in.buffer(), out.buffer()}, [&](Ub& ub) {
    const auto local = ub.Alloc<int32_t, 16384>();
    for (uint32_t i = 0; i < s.blocks; ++i) {
      copy_in(local[s.in_ub(i)], in.tensor()[i * s.bytes / 4], s.bytes / 4);
    }
    order<HardEvent::MTE2_MTE3>();
    DataCopyPad(out.tensor()[1], local, {s.blocks, s.bytes, s.ub_stride, s.gm_stride, 0});
  });
  for (uint32_t i = 0; i < s.blocks; ++i) {
    std::memcpy(&expected[s.in_gm(i)], &in.values[i * s.bytes / 4], s.bytes);
  }
  CHECK(out.values == expected);
}

// Copies `count` values in with `padding`, and returns the first `total` values of local memory.
std::vector<int16_t> padded(uint32_t count, const DataCopyPadExtParams<int16_t>& padding, uint32_t total) {
  Global<int16_t> in("in", count, Access::kRead), out("out", total, Access::kWrite);
  for (uint32_t i = 0; i < count; ++i) in.values[i] = static_cast<int16_t>(i + 5);
  passes({in.buffer(), out.buffer()}, [&](Ub& ub) {
    const auto local = ub.Alloc<int16_t, 64>();
    DataCopyPad(local, in.tensor(), {1, count * 2, 0, 0, 0}, padding);
    order<HardEvent::MTE2_MTE3>();
    copy_out(out.tensor(), local, total);
  });
  return out.values;
}

void test_padding() {
  // If neither side has padding, the first value fills the rest of the block, whether isPad is set or not.
  const std::vector<int16_t> tail = {5, 6, 7, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5};
  CHECK(padded(3, {false, 0, 0, 9}, 16) == tail && padded(3, {true, 0, 0, 9}, 16) == tail);
  const std::vector<int16_t> right = {5, 6, 7, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9};
  CHECK(padded(3, {true, 0, 5, 9}, 16) == right);
  const std::vector<int16_t> both = {9, 9, 5, 6, 7, 8, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9};
  CHECK(padded(4, {true, 2, 10, 9}, 16) == both);

  Global<int16_t> in("in", 16, Access::kRead), out("out", 16, Access::kReadWrite);
  twin({"byte 6 holds no data"}, {in.buffer(), out.buffer()}, [&](bool repaired, Ub& ub) {
    const auto local = ub.Alloc<int16_t, 64>();
    DataCopyPad(local, in.tensor(), {1, 6, 0, 0, 0}, DataCopyPadExtParams<int16_t>{repaired, 0, 5, 0});
    order<HardEvent::MTE2_MTE3>();
    copy_out(out.tensor(), local, 4);
  });
  twin({"17 elements on the left", "at most 32 bytes"}, {in.buffer()}, [&](bool repaired, Ub& ub) {
    const auto local = ub.Alloc<int16_t, 64>();
    const auto left = static_cast<uint8_t>(repaired ? 16 : 17);
    DataCopyPad(local, in.tensor(), {1, 6, 0, 0, 0}, DataCopyPadExtParams<int16_t>{true, left, 5, 0});
  });
  Global<int64_t> wide("wide", 16, Access::kRead);
  twin({"paddingValue of a 64-bit type must be 0"}, {wide.buffer()}, [&](bool repaired, Ub& ub) {
    const auto local = ub.Alloc<int64_t, 64>();
    DataCopyPad(local, wide.tensor(), {1, 8, 0, 0, 0},
                DataCopyPadExtParams<int64_t>{true, 0, 1, repaired ? 0 : 1});
  });
}

void test_limits() {
  Global<float> in("in", 600000, Access::kRead), out("out", 600000, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  const struct {
    uint32_t room;
    DataCopyExtParams broken, repaired;
    Words words;
  } limits[] = {
      {40000, {4096, 4, 0, 0, 0}, {4095, 4, 0, 0, 0}, {"blockCount 4096: 0 to 4095"}},
      {40000, {1, 2097152, 0, 0, 0}, {1, 4, 0, 0, 0}, {"blockLen 2097152 bytes: 0 to 2097151"}},
      {64, {1, 10, 0, 0, 0}, {1, 40, 0, 0, 0}, {"10 is in bytes and must be a multiple of the element's 4"}},
      {64, {2, 68, 0, 3, 0}, {2, 68, 0, 2, 0}, {"dst has 256 bytes, 288 are needed"}},
  };
  for (const auto& limit : limits) {
    twin(limit.words, buffers, [&](bool repaired, Ub& ub) {
      const auto local = ub.Alloc<float>(limit.room);
      DataCopyPad(local, in.tensor(), repaired ? limit.repaired : limit.broken, {false, 0, 0, 0.0f});
    });
  }
  twin({"src has 256 bytes, 288 are needed"}, buffers, [&](bool repaired, Ub& ub) {
    const auto local = ub.Alloc<float, 64>();
    Duplicate(local, 1.0f, 64);
    order<HardEvent::V_MTE3>();
    DataCopyPad(out.tensor(), local, {2, 128, repaired ? 0u : 1u, 0, 0});
  });
  // Empty copies are allowed.
  passes(buffers, [&](Ub& ub) {
    const auto local = ub.Alloc<float, 64>();
    DataCopyPad(local, in.tensor(), {0, 4, 0, 0, 0}, {false, 0, 0, 0.0f});
    DataCopyPad(out.tensor(), local, {4, 0, 0, 0, 0});
  });
}

void test_data_copy() {
  Global<half> in("in", 64, Access::kRead), out("out", 64, Access::kReadWrite);
  count_up(&in, 1);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  twin({"MTE2, DataCopy", "126 bytes: DataCopy rounds down"}, buffers, [&](bool repaired, Ub& ub) {
    const auto local = ub.Alloc<half, 64>();
    DataCopy(local, in.tensor(), repaired ? 64 : 63);
    order<HardEvent::MTE2_MTE3>();
    DataCopy(out.tensor(), local, 64);
  });
  CHECK(std::memcmp(in.values.data(), out.values.data(), 128) == 0);
  twin({"MTE3, DataCopy", "34 bytes: DataCopy rounds down"}, buffers, [&](bool repaired, Ub& ub) {
    const auto local = ub.Alloc<half, 64>();
    DataCopy(local, in.tensor(), DataCopyParams(2, 2, 0, 0));
    order<HardEvent::MTE2_MTE3>();
    DataCopy(out.tensor(), local, repaired ? 16 : 17);
  });
  twin({"for DataCopy it must be a multiple of the element's 2 bytes"}, buffers, [&](bool repaired, Ub& ub) {
    GlobalTensor<half> tensor;
    auto* bytes = reinterpret_cast<uint8_t*>(in.values.data()) + (repaired ? 2 : 1);
    tensor.SetGlobalBuffer(reinterpret_cast<half*>(bytes), 32);
    DataCopy(ub.Alloc<half, 64>(), tensor, 16);
  });
  // Two blocks of 32 bytes, which are 32 bytes apart in global memory and adjacent in local memory.
  passes(buffers, [&](Ub& ub) {
    const auto local = ub.Alloc<half, 64>();
    DataCopy(local, in.tensor(), DataCopyParams(2, 1, 1, 0));
    order<HardEvent::MTE2_MTE3>();
    DataCopy(out.tensor(), local, 32);
  });
  for (int i = 0; i < 32; ++i) CHECK(static_cast<float>(out.values[i]) == (i < 16 ? i : i + 16));
}

// A tensor of a pipe has the position of its buffer, which determines the copies that are allowed.
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
  twin({"MTE2, DataCopyPad", "a tensor at VECCALC: on A2 and A3 copies come to"}, buffers,
       [&](bool repaired) {
         repaired ? through(TBuf<TPosition::VECIN>()) : through(TBuf<TPosition::VECCALC>());
       });
  twin({"MTE3, DataCopyPad", "a tensor at VECCALC: copies go from VECIN and VECOUT only"}, buffers,
       [&](bool repaired, TPipe& pipe) {
         TBuf<TPosition::VECCALC> calc;
         TBuf<TPosition::VECOUT> outgoing;
         pipe.InitBuffer(calc, 256);
         pipe.InitBuffer(outgoing, 256);
         const LocalTensor<float> local = repaired ? outgoing.Get<float>() : calc.Get<float>();
         Duplicate(local, 1.0f, 64);
         order<HardEvent::V_MTE3>();
         copy_out(out.tensor(), local, 64);
       });
}

}  // namespace

int main() {
  test_positions();
  for (const Shape& shape : kShapes) {
    test_blocks_in(shape);
    test_blocks_out(shape);
  }
  test_padding();
  test_limits();
  test_data_copy();
  return check_result();
}
