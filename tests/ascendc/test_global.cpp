// Tests of global memory: bounds, buffers' permissions, order of accesses within a core and between cores,
// the data cache of the scalar unit, and atomic copies.
#include "support.h"

namespace {

using Buffers = std::vector<Buffer>;

template <class T>
GlobalTensor<T> tensor_at(T* address, uint64_t count = 0) {
  GlobalTensor<T> tensor;
  count == 0 ? tensor.SetGlobalBuffer(address) : tensor.SetGlobalBuffer(address, count);
  return tensor;
}

// Returns a core's part of a tensor that has `elements` elements for each core.
template <class T>
GlobalTensor<T> part(const GlobalTensor<T>& tensor, int64_t elements, int64_t core = GetBlockIdx()) {
  return tensor[static_cast<uint64_t>(core * elements)];
}

// A tensor of ones in local memory, ready to be copied out.
template <class T = float>
LocalTensor<T> ones(Ub& ub, T value = T(1)) {
  const auto tensor = ub.Alloc<T, 64>();
  Duplicate(tensor, value, 64);
  order<HardEvent::V_MTE3>();
  return tensor;
}

template <CacheLine lines = CacheLine::SINGLE_CACHE_LINE, class T>
void clean(const GlobalTensor<T>& tensor) {
  DataCacheCleanAndInvalid<T, lines, DcciDst::CACHELINE_OUT>(tensor);
}

void test_bounds() {
  Global<float> in("in", 64, Access::kRead), out("out", 64, Access::kReadWrite);
  std::vector<float> unknown(64);
  const Buffers buffers = {in.buffer(), out.buffer()};
  twin({"MTE2, DataCopyPad", "64 bytes of a tensor in global memory that has 60"}, buffers,
       [&](bool repaired, Ub& ub) { copy_in(ub.Alloc<float, 64>(), in.tensor()[repaired ? 48 : 49], 16); });
  twin({"touches bytes 200 to 264 of 'in', which has 256"}, buffers, [&](bool repaired, Ub& ub) {
    const auto tensor = tensor_at(in.values.data());
    CHECK(tensor.GetSize() == 0);
    copy_in(ub.Alloc<float, 64>(), tensor[repaired ? 48 : 50], 16);
  });
  twin({"which is in no buffer of this launch", "'in' ["}, buffers, [&](bool repaired, Ub& ub) {
    copy_in(ub.Alloc<float, 64>(), tensor_at(repaired ? in.values.data() : unknown.data(), 64), 16);
  });
  twin({"MTE3", "touches bytes 244 to 260 of 'out'"}, buffers, [&](bool repaired, Ub& ub) {
    copy_out(tensor_at(out.values.data())[repaired ? 60 : 61], ones(ub), 4);
  });
  twin({"GlobalTensor[]", "offset 65 of a tensor of 64 elements"}, buffers,
       [&](bool repaired) { in.tensor()[repaired ? 64 : 65]; });
  twin({"GlobalTensor::GetValue", "element 64 of a tensor of 64"}, buffers,
       [&](bool repaired) { in.tensor().GetValue(repaired ? 63 : 64); });
  twin({"is not a multiple of the element's 4 bytes"}, buffers, [&](bool repaired) {
    auto* bytes = reinterpret_cast<uint8_t*>(in.values.data()) + (repaired ? 4 : 2);
    tensor_at(reinterpret_cast<int32_t*>(bytes), 4).GetValue(0);
  });
}

void test_access() {
  Global<float> data("data", 64, Access::kRead), out("out", 16, Access::kWrite);
  const Buffers buffers = {data.buffer(), out.buffer()};
  twin({"writes to 'data', which this launch may only read"}, buffers,
       [&](bool repaired, Ub& ub) { copy_out(repaired ? out.tensor() : data.tensor(), ones(ub), 16); });
  CHECK(out.values[15] == 1.0f);
  twin({"GlobalTensor::SetValue", "may only read"}, buffers, [&](bool repaired) {
    auto tensor = repaired ? out.tensor() : data.tensor();
    for (uint32_t i = 0; i < 16; ++i) tensor.SetValue(i, 1.0f);
    clean<CacheLine::ENTIRE_DATA_CACHE>(tensor);
  });
  twin({"reads byte 60 of 'out', an output that nothing has written yet"}, buffers,
       [&](bool repaired, Ub& ub) {
         copy_out(out.tensor(), ones(ub), repaired ? 16 : 15);
         order<HardEvent::MTE3_MTE2>();
         copy_in(ub.Alloc<float, 64>(), out.tensor(), 16);
       });
  twin({"combines with byte 0 of 'out', an output that nothing has written yet"}, buffers,
       [&](bool repaired, Ub& ub) {
         const auto tensor = ones(ub);
         if (repaired) copy_out(out.tensor(), tensor, 16);
         PipeBarrier<PIPE_MTE3>();
         SetAtomicAdd<float>();
         copy_out(out.tensor(), tensor, 16);
         SetAtomicNone();
       });
  // Bytes of a read-only buffer inside a writable buffer may be written.
  const Buffers nested = {{"rows", data.values.data(), 128, Access::kRead},
                          {"cache", data.values.data(), 256, Access::kReadWrite}};
  passes(nested, [&](Ub& ub) {
    copy_in(ub.Alloc<float, 64>(), data.tensor(), 16);
    order<HardEvent::MTE2_MTE3>();
    copy_out(data.tensor(), ones(ub), 16);
  });
}

// Each core writes half of the output. The halves do not start or end at cache lines.
void test_outputs_are_written() {
  constexpr uint32_t kHalf = 35003;
  std::vector<float> values(2 * kHalf + 2, 5.0f);
  const Buffers buffers = {{"out", values.data() + 1, 2 * kHalf * sizeof(float), Access::kWrite}};
  const auto write = [&](int64_t half, uint32_t begin, uint32_t end) {
    Ub ub;
    const auto part = ub.Alloc<float>(kHalf);
    Duplicate(part, 1.0f, kHalf);
    order<HardEvent::V_MTE3>();
    copy_out(tensor_at(values.data() + 1 + half * kHalf, kHalf)[begin], part, end - begin);
  };
  twin({"kernel 'kernel', 2 cores: ends, and nothing has written byte 140008 of",
        "'out', an output of 280024 bytes"},
       {buffers, 2}, [&](bool repaired) { write(GetBlockIdx(), 0, kHalf - (repaired ? 0 : 1)); });
  CHECK(values.front() == 5.0f && values.back() == 5.0f && values[1] == 1.0f);
  // Writes in an earlier launch do not count as writes in this launch.
  twin({"nothing has written byte 0 of 'out'"}, {buffers, 2},
       [&](bool repaired) { write(GetBlockIdx(), repaired ? 0 : 1, kHalf); });
  twin({"nothing has written byte 140012 of 'out'"}, {buffers, 2}, [&](bool repaired) {
    if (GetBlockIdx() == 0 || repaired) write(GetBlockIdx(), 0, kHalf);
  });
  CHECK(values[kHalf + 1] == 1.0f);
  // The cores take turns to write single bytes, with a SyncAll after each byte.
  std::vector<uint8_t> bytes(100);
  twin({"nothing has written byte 77 of 'bytes'"}, {{{"bytes", bytes.data(), 100, Access::kWrite}}, 2},
       [&](bool repaired) {
         auto tensor = tensor_at(bytes.data(), 100);
         for (uint32_t i = 0; i < 100; ++i) {
           if (i % 2 == GetBlockIdx() && (repaired || i != 77)) tensor.SetValue(i, 1);
           clean<CacheLine::ENTIRE_DATA_CACHE>(tensor);
           SyncAll();
         }
       });
  // A failed launch reports its own error, instead of the bytes that it has not written.
  check_error(run([&] { write(0, 0, kHalf + 1); }, buffers), {"has 140012"});
}

void test_order_within_a_core() {
  Global<float> data("data", 64, Access::kReadWrite);
  const Buffers buffers = {data.buffer()};
  twin({"reads byte 60 of 'data' that DataCopyPad (MTE3", "HardEvent::MTE3_MTE2"}, buffers,
       [&](bool repaired, Ub& ub) {
         copy_out(data.tensor(), ones(ub), 16);
         if (repaired) order<HardEvent::MTE3_MTE2>();
         copy_in(ub.Alloc<float, 64>(), data.tensor()[15], 4);
       });
  twin({"overwrites byte 0 of 'data' that DataCopyPad (MTE2", "HardEvent::MTE2_MTE3"}, buffers,
       [&](bool repaired, Ub& ub) {
         const auto tensor = ones(ub);
         copy_in(ub.Alloc<float, 64>(), data.tensor(), 16);
         if (repaired) order<HardEvent::MTE2_MTE3>();
         copy_out(data.tensor(), tensor, 1);
       });
  twin({"GetValue (S", "HardEvent::S_MTE3"}, buffers, [&](bool repaired, Ub& ub) {
    const auto tensor = ones(ub);
    data.tensor().GetValue(3);
    if (repaired) order<HardEvent::S_MTE3>();
    copy_out(data.tensor(), tensor, 16);
  });
  twin({"writes byte 32 of 'data'", "PipeBarrier<PIPE_MTE3>"}, buffers, [&](bool repaired, Ub& ub) {
    const auto tensor = ones(ub);
    copy_out(data.tensor(), tensor, 16);
    if (repaired) PipeBarrier<PIPE_MTE3>();
    copy_out(data.tensor()[8], tensor, 16);
  });
  // Two tiles share a cache line: the second is still being read while the first is written back.
  twin({"overwrites byte 12 of 'data'", "HardEvent::MTE2_MTE3"}, buffers, [&](bool repaired, Ub& ub) {
    const auto first = ub.Alloc<float, 16>(), second = ub.Alloc<float, 16>();
    const auto rows = data.tensor();
    copy_in(first, rows, 3);
    SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
    copy_in(second, rows[3], 3);
    SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID1);
    WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
    copy_out(rows[repaired ? 0 : 1], first, 3);
    WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID1);
    copy_out(rows[repaired ? 3 : 4], second, 3);
  });
  // Adjacent copies that do not overlap need no order.
  passes(buffers, [&](Ub& ub) {
    const auto tensor = ones(ub);
    for (uint32_t i = 0; i < 16; ++i) copy_out(data.tensor()[i * 3], tensor, 3);
  });
}

void test_order_between_cores() {
  Global<float> data("data", 64, Access::kReadWrite);
  const Buffers buffers = {data.buffer()};
  twin({"of 'data', which another core wrote (MTE3)", "without a SyncAll"}, {buffers, 3},
       [&](bool repaired, Ub& ub) { copy_out(part(data.tensor(), repaired ? 5 : 4), ones(ub), 5); });
  twin({"of 'data', which another core"}, {buffers, 3}, [&](bool repaired, Ub& ub) {
    if (GetBlockIdx() == 0) copy_out(data.tensor(), ones(ub), 5);
    if (GetBlockIdx() != 0) copy_in(ub.Alloc<float, 64>(), data.tensor()[repaired ? 5 : 4], 2);
  });
  passes({buffers, 5}, [&](Ub& ub) { copy_in(ub.Alloc<float, 64>(), data.tensor(), 64); });
  twin({"without a SyncAll"}, {buffers, 4}, [&](bool repaired, Ub& ub) {
    copy_out(part(data.tensor(), 1), ones(ub), 1);
    if (repaired) SyncAll();
    PipeBarrier<PIPE_ALL>();
    copy_in(ub.Alloc<float, 64>(), data.tensor(), 4);
  });
  // Three cores share a cache line; accesses are nevertheless compared byte by byte.
  twin({"of 'data', which another core"}, {buffers, 3}, [&](bool repaired, Ub& ub) {
    const auto tensor = ub.Alloc<float, 64>();
    const auto mine = part(data.tensor(), 2);
    copy_in(tensor, mine, 2);
    order<HardEvent::MTE2_MTE3>();
    copy_out(mine[repaired ? 0 : 1], tensor, 2);
  });
}

void test_data_cache() {
  Global<int32_t> data("data", 64, Access::kReadWrite, 3);
  const Buffers buffers = {data.buffer()};
  twin({"1 lines written by SetValue are still in the data cache"}, buffers, [&](bool repaired) {
    auto tensor = data.tensor();
    tensor.SetValue(1, 4);
    CHECK(tensor.GetValue(1) == 4);
    if (repaired) clean(tensor[1]);
  });
  twin({"which SetValue wrote to the data cache: DataCacheCleanAndInvalid"}, buffers,
       [&](bool repaired, Ub& ub) {
         auto tensor = data.tensor();
         tensor.SetValue(1, 4);
         if (repaired) clean<CacheLine::ENTIRE_DATA_CACHE>(tensor);
         order<HardEvent::S_MTE2>();
         copy_in(ub.Alloc<int32_t, 64>(), tensor, 2);
         clean(tensor);
       });
  twin({"SetValue (S", "HardEvent::S_MTE2"}, buffers, [&](bool repaired, Ub& ub) {
    auto tensor = data.tensor();
    tensor.SetValue(1, 4);
    clean(tensor);
    if (repaired) order<HardEvent::S_MTE2>();
    copy_in(ub.Alloc<int32_t, 64>(), tensor, 2);
  });
  twin({"in the data cache, which has held its line since before a copy"}, buffers,
       [&](bool repaired, Ub& ub) {
         const auto source = ones<int32_t>(ub);
         auto tensor = data.tensor();
         tensor.GetValue(0);
         order<HardEvent::S_MTE3>();
         copy_out(tensor, source, 8);
         order<HardEvent::MTE3_S>();
         if (repaired) clean(tensor);
         CHECK(tensor.GetValue(0) == 1);
       });
  twin({"GetValue", "HardEvent::MTE3_S"}, buffers, [&](bool repaired, Ub& ub) {
    copy_out(data.tensor(), ones<int32_t>(ub), 8);
    if (repaired) order<HardEvent::MTE3_S>();
    data.tensor().GetValue(0);
  });
}

// The hardware cleans a line only from the address to the end of the line.
void test_cleaning_a_part_of_a_line() {
  alignas(64) static int32_t values[16];
  const Buffers buffers = {{"values", values, sizeof(values), Access::kReadWrite}};
  twin({"1 lines written by SetValue are still in the data cache"}, buffers, [](bool repaired) {
    auto tensor = tensor_at(values, 16);
    tensor.SetValue(2, 1);
    tensor.SetValue(9, 1);
    clean(tensor[repaired ? 2 : 3]);
  });
}

void test_data_caches_of_two_cores() {
  alignas(64) static int32_t values[64];
  const Buffers buffers = {{"values", values, sizeof(values), Access::kReadWrite}};
  const auto line = [](int64_t core) { return part(tensor_at(values, 64), 16, core); };
  twin({"in a 64-byte line that another core writes too"}, {buffers, 2}, [&](bool repaired) {
    auto mine = part(tensor_at(values, 64), repaired ? 16 : 8);
    mine.SetValue(0, 1);
    clean(mine);
  });
  twin({"SyncAll", "where other cores cannot see them"}, {buffers, 2}, [&](bool repaired) {
    auto mine = line(GetBlockIdx());
    mine.SetValue(0, 7);
    if (repaired) clean(mine);
    SyncAll();
    CHECK(!repaired || line(1 - GetBlockIdx()).GetValue(0) == 7);
    clean(mine);
  });
  twin({"GetValue", "in the data cache, which has held its line"}, {buffers, 2}, [&](bool repaired) {
    auto mine = line(GetBlockIdx());
    const auto other = line(1 - GetBlockIdx());
    other.GetValue(1);
    SyncAll();
    mine.SetValue(1, 7);
    clean(mine);
    SyncAll();
    if (repaired) clean(other);
    other.GetValue(1);
  });
}

void test_atomics() {
  Global<float> sums("sums", 64, Access::kReadWrite, 10.0f);
  const Buffers buffers = {sums.buffer()};
  const auto add = [&](bool repaired, Ub& ub) {
    const auto tensor = ones(ub, 2.0f);
    if (repaired) SetAtomicAdd<float>();
    copy_out(sums.tensor(), tensor, 16);
    copy_out(sums.tensor()[8], tensor, 16);
    SetAtomicNone();
  };
  twin({"PipeBarrier<PIPE_MTE3>"}, buffers, add);
  sums.values.assign(64, 10.0f);
  passes({buffers, 5}, [&](Ub& ub) { add(true, ub); });
  CHECK(sums.values[0] == 20.0f && sums.values[8] == 30.0f && sums.values[24] == 10.0f);
  twin({"atomic copies are still on"}, [&](bool repaired) {
    SetAtomicAdd<float>();
    if (repaired) DisableDmaAtomic();
  });
  twin({"the copied type is not the one that SetAtomicAdd"}, buffers, [&](bool repaired, Ub& ub) {
    const auto tensor = ones(ub);
    repaired ? SetAtomicAdd<float>() : SetAtomicAdd<int32_t>();
    copy_out(sums.tensor(), tensor, 16);
    SetAtomicNone();
  });
  twin({"of 'sums', which another core"}, {buffers, 3}, [&](bool repaired, Ub& ub) {
    const auto tensor = ones(ub);
    SetAtomicAdd<float>();
    copy_out(sums.tensor(), tensor, 16);
    SetAtomicNone();
    if (repaired) SyncAll();
    PipeBarrier<PIPE_ALL>();
    copy_in(ub.Alloc<float, 64>(), sums.tensor(), 4);
  });
  twin({"byte 64 of 'sums', which another core wrote (MTE3)"}, {buffers, 3}, [&](bool repaired, Ub& ub) {
    const auto tensor = ones(ub);
    SetAtomicAdd<float>();
    copy_out(sums.tensor(), tensor, 16);
    if (!repaired) SetAtomicNone();
    copy_out(sums.tensor()[16], tensor, 16);
    SetAtomicNone();
  });
  sums.values.assign(64, 1.0f);
  passes({buffers, 4}, [&](Ub& ub) {
    const auto tensor = ones(ub, static_cast<float>(GetBlockIdx()));
    SetAtomicMax<float>();
    copy_out(sums.tensor(), tensor, 1);
    SetAtomicMin<float>();
    copy_out(sums.tensor()[1], tensor, 1);
    SetAtomicNone();
  });
  CHECK(sums.values[0] == 3.0f && sums.values[1] == 0.0f);
}

}  // namespace

int main() {
  test_bounds();
  test_access();
  test_outputs_are_written();
  test_order_within_a_core();
  test_order_between_cores();
  test_data_cache();
  test_cleaning_a_part_of_a_line();
  test_data_caches_of_two_cores();
  test_atomics();
  return check_result();
}
