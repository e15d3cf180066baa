// Global memory: bounds, what a launch may do to a buffer, order within a core and between cores, the data
// cache of the scalar unit, and atomic copies.
#include "support.h"

namespace {

using Kernel = std::function<void(bool)>;
using Buffers = std::vector<Buffer>;

constexpr uint32_t kCount = 16;

// A tensor of ones in local memory, ready to be copied out.
LocalTensor<float> ones(LocalMemAllocator<>& allocator, float value = 1.0f) {
  const auto tensor = allocator.Alloc<float, 64>();
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
  const Kernel past_the_tensor = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    copy_in(allocator.Alloc<float, 64>(), in.tensor()[repaired ? 48 : 49], 16);
  };
  CHECK_TWIN(past_the_tensor, buffers, 1, "MTE2, DataCopyPad",
             "64 bytes of a tensor in global memory that has 60");
  const Kernel past_the_buffer = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    GlobalTensor<float> tensor;
    tensor.SetGlobalBuffer(in.values.data());
    CHECK(tensor.GetSize() == 0);
    copy_in(allocator.Alloc<float, 64>(), tensor[repaired ? 48 : 50], 16);
  };
  CHECK_TWIN(past_the_buffer, buffers, 1, "touches bytes 200 to 264 of 'in', which has 256");
  const Kernel no_buffer = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    GlobalTensor<float> tensor;
    tensor.SetGlobalBuffer(repaired ? in.values.data() : unknown.data(), 64);
    copy_in(allocator.Alloc<float, 64>(), tensor, 16);
  };
  CHECK_TWIN(no_buffer, buffers, 1, "which is in no buffer of this launch", "'in' [");
  const Kernel out_of_the_buffer = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    GlobalTensor<float> tensor;
    tensor.SetGlobalBuffer(out.values.data());
    copy_out(tensor[repaired ? 60 : 61], ones(allocator), 4);
  };
  CHECK_TWIN(out_of_the_buffer, buffers, 1, "MTE3", "touches bytes 244 to 260 of 'out'");
  const Kernel offset = [&](bool repaired) { in.tensor()[repaired ? 64 : 65]; };
  CHECK_TWIN(offset, buffers, 1, "GlobalTensor[]", "offset 65 of a tensor of 64 elements");
  const Kernel value = [&](bool repaired) { in.tensor().GetValue(repaired ? 63 : 64); };
  CHECK_TWIN(value, buffers, 1, "GlobalTensor::GetValue", "element 64 of a tensor of 64");
  const Kernel between_elements = [&](bool repaired) {
    GlobalTensor<int32_t> tensor;
    auto* bytes = reinterpret_cast<uint8_t*>(in.values.data()) + (repaired ? 4 : 2);
    tensor.SetGlobalBuffer(reinterpret_cast<int32_t*>(bytes), 4);
    tensor.GetValue(0);
  };
  CHECK_TWIN(between_elements, buffers, 1, "is not a multiple of the element's 4 bytes");
}

void test_access() {
  Global<float> data("data", 64, Access::kRead), out("out", 16, Access::kWrite);
  const Buffers buffers = {data.buffer(), out.buffer()};
  const Kernel writes_input = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    copy_out(repaired ? out.tensor() : data.tensor(), ones(allocator), 16);
  };
  CHECK_TWIN(writes_input, buffers, 1, "writes to 'data', which this launch may only read");
  CHECK(out.values[15] == 1.0f);
  const Kernel stores_input = [&](bool repaired) {
    auto tensor = repaired ? out.tensor() : data.tensor();
    for (uint32_t i = 0; i < 16; ++i) tensor.SetValue(i, 1.0f);
    clean<CacheLine::ENTIRE_DATA_CACHE>(tensor);
  };
  CHECK_TWIN(stores_input, buffers, 1, "GlobalTensor::SetValue", "may only read");
  const Kernel reads_output = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    copy_out(out.tensor(), ones(allocator), repaired ? 16 : 15);
    order<HardEvent::MTE3_MTE2>();
    copy_in(allocator.Alloc<float, 64>(), out.tensor(), 16);
  };
  CHECK_TWIN(reads_output, buffers, 1, "reads byte 60 of 'out', an output that nothing has written yet");
  const Kernel adds_to_output = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto tensor = ones(allocator);
    if (repaired) copy_out(out.tensor(), tensor, 16);
    PipeBarrier<PIPE_MTE3>();
    SetAtomicAdd<float>();
    copy_out(out.tensor(), tensor, 16);
    SetAtomicNone();
  };
  CHECK_TWIN(adds_to_output, buffers, 1,
             "combines with byte 0 of 'out', an output that nothing has written yet");
  // A buffer for reading inside one for writing is one of both.
  const Buffers nested = {{"rows", data.values.data(), 128, Access::kRead},
                          {"cache", data.values.data(), 256, Access::kReadWrite}};
  CHECK_PASSES(run(
      [&] {
        LocalMemAllocator<> allocator;
        copy_in(allocator.Alloc<float, 64>(), data.tensor(), 16);
        order<HardEvent::MTE2_MTE3>();
        copy_out(data.tensor(), ones(allocator), 16);
      },
      nested));
}

// Each core writes its half, which neither starts nor ends with a line.
void test_outputs_are_written() {
  constexpr uint32_t kHalf = 35003;
  std::vector<float> values(2 * kHalf + 2, 5.0f);
  const Buffers buffers = {{"out", values.data() + 1, 2 * kHalf * sizeof(float), Access::kWrite}};
  const auto write = [&](int64_t half, uint32_t begin, uint32_t end) {
    LocalMemAllocator<> allocator;
    const auto part = allocator.Alloc<float>(kHalf);
    Duplicate(part, 1.0f, kHalf);
    order<HardEvent::V_MTE3>();
    GlobalTensor<float> tensor;
    tensor.SetGlobalBuffer(values.data() + 1 + half * kHalf, kHalf);
    copy_out(tensor[begin], part, end - begin);
  };
  const Kernel end_missing = [&](bool repaired) { write(GetBlockIdx(), 0, kHalf - (repaired ? 0 : 1)); };
  CHECK_TWIN(end_missing, buffers, 2,
             "kernel 'kernel', 2 cores: ends, and nothing has written byte 140008 of",
             "'out', an output of 280024 bytes");
  CHECK(values.front() == 5.0f && values.back() == 5.0f && values[1] == 1.0f);
  // Writes of an earlier launch do not count.
  const Kernel start_missing = [&](bool repaired) { write(GetBlockIdx(), repaired ? 0 : 1, kHalf); };
  CHECK_TWIN(start_missing, buffers, 2, "nothing has written byte 0 of 'out'");
  const Kernel half_missing = [&](bool repaired) {
    if (GetBlockIdx() == 0 || repaired) write(GetBlockIdx(), 0, kHalf);
  };
  CHECK_TWIN(half_missing, buffers, 2, "nothing has written byte 140012 of 'out'");
  CHECK(values[kHalf + 1] == 1.0f);
  // After a SyncAll, and a byte at a time.
  std::vector<uint8_t> bytes(100);
  const Kernel by_turns = [&](bool repaired) {
    GlobalTensor<uint8_t> tensor;
    tensor.SetGlobalBuffer(bytes.data(), 100);
    for (uint32_t i = 0; i < 100; ++i) {
      if (i % 2 == GetBlockIdx() && (repaired || i != 77)) tensor.SetValue(i, 1);
      clean<CacheLine::ENTIRE_DATA_CACHE>(tensor);
      SyncAll();
    }
  };
  CHECK_TWIN(by_turns, (Buffers{{"bytes", bytes.data(), 100, Access::kWrite}}), 2,
             "nothing has written byte 77 of 'bytes'");
  // A launch that fails says why, not what it did not write.
  CHECK_ERROR(run([&] { write(0, 0, kHalf + 1); }, buffers), "has 140012");
}

void test_order_within_a_core() {
  Global<float> data("data", 64, Access::kReadWrite);
  const Buffers buffers = {data.buffer()};
  const Kernel read_after_write = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    copy_out(data.tensor(), ones(allocator), 16);
    if (repaired) order<HardEvent::MTE3_MTE2>();
    copy_in(allocator.Alloc<float, 64>(), data.tensor()[15], 4);
  };
  CHECK_TWIN(read_after_write, buffers, 1, "reads byte 60 of 'data' that DataCopyPad (MTE3",
             "HardEvent::MTE3_MTE2");
  const Kernel write_after_read = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto tensor = ones(allocator);
    copy_in(allocator.Alloc<float, 64>(), data.tensor(), 16);
    if (repaired) order<HardEvent::MTE2_MTE3>();
    copy_out(data.tensor(), tensor, 1);
  };
  CHECK_TWIN(write_after_read, buffers, 1, "overwrites byte 0 of 'data' that DataCopyPad (MTE2",
             "HardEvent::MTE2_MTE3");
  const Kernel scalar_reads_first = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto tensor = ones(allocator);
    data.tensor().GetValue(3);
    if (repaired) order<HardEvent::S_MTE3>();
    copy_out(data.tensor(), tensor, 16);
  };
  CHECK_TWIN(scalar_reads_first, buffers, 1, "GetValue (S", "HardEvent::S_MTE3");
  const Kernel write_after_write = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto tensor = ones(allocator);
    copy_out(data.tensor(), tensor, 16);
    if (repaired) PipeBarrier<PIPE_MTE3>();
    copy_out(data.tensor()[8], tensor, 16);
  };
  CHECK_TWIN(write_after_write, buffers, 1, "writes byte 32 of 'data'", "PipeBarrier<PIPE_MTE3>");
  // Rows of two tiles in one line: the second is still on its way while the first is written back.
  const Kernel neighbours = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto first = allocator.Alloc<float, 16>(), second = allocator.Alloc<float, 16>();
    const auto rows = data.tensor();
    copy_in(first, rows, 3);
    SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
    copy_in(second, rows[3], 3);
    SetFlag<HardEvent::MTE2_MTE3>(EVENT_ID1);
    WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID0);
    copy_out(rows[repaired ? 0 : 1], first, 3);
    WaitFlag<HardEvent::MTE2_MTE3>(EVENT_ID1);
    copy_out(rows[repaired ? 3 : 4], second, 3);
  };
  CHECK_TWIN(neighbours, buffers, 1, "overwrites byte 12 of 'data'", "HardEvent::MTE2_MTE3");
  // Neighbours that do not overlap need no order.
  CHECK_PASSES(run(
      [&] {
        LocalMemAllocator<> allocator;
        const auto tensor = ones(allocator);
        for (uint32_t i = 0; i < 16; ++i) copy_out(data.tensor()[i * 3], tensor, 3);
      },
      buffers));
}

void test_order_between_cores() {
  Global<float> data("data", 64, Access::kReadWrite);
  const Buffers buffers = {data.buffer()};
  const Kernel both_write = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto tensor = ones(allocator);
    const auto at = static_cast<uint64_t>(GetBlockIdx()) * (repaired ? 5 : 4);
    copy_out(data.tensor()[at], tensor, 5);
  };
  CHECK_TWIN(both_write, buffers, 3, "of 'data', which another core wrote (MTE3)", "without a SyncAll");
  const Kernel one_reads = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    if (GetBlockIdx() == 0) copy_out(data.tensor(), ones(allocator), 5);
    if (GetBlockIdx() != 0) copy_in(allocator.Alloc<float, 64>(), data.tensor()[repaired ? 5 : 4], 2);
  };
  CHECK_TWIN(one_reads, buffers, 3, "of 'data', which another core");
  CHECK_PASSES(run(
      [&] {
        LocalMemAllocator<> allocator;
        const auto tensor = allocator.Alloc<float, 64>();
        copy_in(tensor, data.tensor(), 64);
      },
      buffers, 5));
  const Kernel after_sync = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    copy_out(data.tensor()[static_cast<uint64_t>(GetBlockIdx())], ones(allocator), 1);
    if (repaired) SyncAll();
    PipeBarrier<PIPE_ALL>();
    copy_in(allocator.Alloc<float, 64>(), data.tensor(), 4);
  };
  CHECK_TWIN(after_sync, buffers, 4, "without a SyncAll");
  // Three cores in one line: what each may touch is still known by byte.
  const Kernel mixed = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto at = static_cast<uint64_t>(GetBlockIdx()) * 2;
    const auto tensor = allocator.Alloc<float, 64>();
    copy_in(tensor, data.tensor()[at], 2);
    order<HardEvent::MTE2_MTE3>();
    copy_out(data.tensor()[at + (repaired ? 0 : 1)], tensor, 2);
  };
  CHECK_TWIN(mixed, buffers, 3, "of 'data', which another core");
}

void test_data_cache() {
  Global<int32_t> data("data", 64, Access::kReadWrite, 3);
  data.values.resize(64);
  const Buffers buffers = {data.buffer()};
  const Kernel never_cleaned = [&](bool repaired) {
    auto tensor = data.tensor();
    tensor.SetValue(1, 4);
    CHECK(tensor.GetValue(1) == 4);
    if (repaired) clean(tensor[1]);
  };
  CHECK_TWIN(never_cleaned, buffers, 1, "1 lines written by SetValue are still in the data cache");
  const Kernel copied_before_cleaned = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    auto tensor = data.tensor();
    tensor.SetValue(1, 4);
    if (repaired) clean<CacheLine::ENTIRE_DATA_CACHE>(tensor);
    order<HardEvent::S_MTE2>();
    copy_in(allocator.Alloc<int32_t, 64>(), tensor, 2);
    clean(tensor);
  };
  CHECK_TWIN(copied_before_cleaned, buffers, 1,
             "which SetValue wrote to the data cache: DataCacheCleanAndInvalid");
  const Kernel copied_without_order = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    auto tensor = data.tensor();
    tensor.SetValue(1, 4);
    clean(tensor);
    if (repaired) order<HardEvent::S_MTE2>();
    copy_in(allocator.Alloc<int32_t, 64>(), tensor, 2);
  };
  CHECK_TWIN(copied_without_order, buffers, 1, "SetValue (S", "HardEvent::S_MTE2");
  const Kernel stale = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto ones = allocator.Alloc<int32_t, 64>();
    Duplicate(ones, 1, 64);
    order<HardEvent::V_MTE3>();
    auto tensor = data.tensor();
    tensor.GetValue(0);
    order<HardEvent::S_MTE3>();
    copy_out(tensor, ones, 8);
    order<HardEvent::MTE3_S>();
    if (repaired) clean(tensor);
    CHECK(!repaired || tensor.GetValue(0) == 1);
    if (!repaired) tensor.GetValue(0);
  };
  CHECK_TWIN(stale, buffers, 1, "in the data cache, which has held its line since before a copy");
  const Kernel read_too_early = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto ones = allocator.Alloc<int32_t, 64>();
    Duplicate(ones, 1, 64);
    order<HardEvent::V_MTE3>();
    copy_out(data.tensor(), ones, 8);
    if (repaired) order<HardEvent::MTE3_S>();
    data.tensor().GetValue(0);
  };
  CHECK_TWIN(read_too_early, buffers, 1, "GetValue", "HardEvent::MTE3_S");
}

// The hardware cleans from the address to the end of its line, not the whole line.
void test_cleaning_a_part_of_a_line() {
  alignas(64) static int32_t values[16];
  const Buffers buffers = {{"values", values, sizeof(values), Access::kReadWrite}};
  const Kernel kernel = [](bool repaired) {
    GlobalTensor<int32_t> tensor;
    tensor.SetGlobalBuffer(values, 16);
    tensor.SetValue(2, 1);
    tensor.SetValue(9, 1);
    clean(tensor[repaired ? 2 : 3]);
  };
  CHECK_TWIN(kernel, buffers, 1, "1 lines written by SetValue are still in the data cache");
}

void test_data_caches_of_two_cores() {
  alignas(64) static int32_t values[64];
  const Buffers buffers = {{"values", values, sizeof(values), Access::kReadWrite}};
  const auto tensor = [] {
    GlobalTensor<int32_t> result;
    result.SetGlobalBuffer(values, 64);
    return result;
  };
  const Kernel same_line = [&](bool repaired) {
    auto mine = tensor()[static_cast<uint64_t>(GetBlockIdx()) * (repaired ? 16 : 8)];
    mine.SetValue(0, 1);
    clean(mine);
  };
  CHECK_TWIN(same_line, buffers, 2, "in a 64-byte line that another core writes too");
  const Kernel unclean_sync = [&](bool repaired) {
    auto mine = tensor()[static_cast<uint64_t>(GetBlockIdx()) * 16];
    mine.SetValue(0, 7);
    if (repaired) clean(mine);
    SyncAll();
    CHECK(!repaired || tensor()[static_cast<uint64_t>(1 - GetBlockIdx()) * 16].GetValue(0) == 7);
    clean(mine);
  };
  CHECK_TWIN(unclean_sync, buffers, 2, "SyncAll", "where other cores cannot see them");
  const Kernel stale_after_sync = [&](bool repaired) {
    auto mine = tensor()[static_cast<uint64_t>(GetBlockIdx()) * 16];
    const auto other = tensor()[static_cast<uint64_t>(1 - GetBlockIdx()) * 16];
    other.GetValue(1);
    SyncAll();
    mine.SetValue(1, 7);
    clean(mine);
    SyncAll();
    if (repaired) clean(other);
    other.GetValue(1);
  };
  CHECK_TWIN(stale_after_sync, buffers, 2, "GetValue", "in the data cache, which has held its line");
}

void test_atomics() {
  Global<float> sums("sums", 64, Access::kReadWrite, 10.0f);
  const Buffers buffers = {sums.buffer()};
  const Kernel add = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto tensor = ones(allocator, 2.0f);
    if (repaired) SetAtomicAdd<float>();
    copy_out(sums.tensor(), tensor, 16);
    copy_out(sums.tensor()[8], tensor, 16);
    SetAtomicNone();
  };
  CHECK_TWIN(add, buffers, 1, "PipeBarrier<PIPE_MTE3>");
  sums.values.assign(64, 10.0f);
  CHECK_PASSES(run([&] { add(true); }, buffers, 5));
  CHECK(sums.values[0] == 20.0f && sums.values[8] == 30.0f && sums.values[24] == 10.0f);
  const Kernel left_on = [&](bool repaired) {
    SetAtomicAdd<float>();
    if (repaired) DisableDmaAtomic();
  };
  CHECK_TWIN(left_on, {}, 1, "atomic copies are still on");
  const Kernel other_type = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto tensor = ones(allocator);
    repaired ? SetAtomicAdd<float>() : SetAtomicAdd<int32_t>();
    copy_out(sums.tensor(), tensor, 16);
    SetAtomicNone();
  };
  CHECK_TWIN(other_type, buffers, 1, "the copied type is not the one that SetAtomicAdd");
  const Kernel read_by_another = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto tensor = ones(allocator);
    SetAtomicAdd<float>();
    copy_out(sums.tensor(), tensor, 16);
    SetAtomicNone();
    if (repaired) SyncAll();
    PipeBarrier<PIPE_ALL>();
    copy_in(allocator.Alloc<float, 64>(), sums.tensor(), 4);
  };
  CHECK_TWIN(read_by_another, buffers, 3, "of 'sums', which another core");
  const Kernel plain_beside_atomic = [&](bool repaired) {
    LocalMemAllocator<> allocator;
    const auto tensor = ones(allocator);
    SetAtomicAdd<float>();
    copy_out(sums.tensor(), tensor, 16);
    if (!repaired) SetAtomicNone();
    copy_out(sums.tensor()[16], tensor, 16);
    SetAtomicNone();
  };
  CHECK_TWIN(plain_beside_atomic, buffers, 3, "byte 64 of 'sums', which another core wrote (MTE3)");
  const Kernel largest = [&](bool) {
    LocalMemAllocator<> allocator;
    const auto tensor = ones(allocator, static_cast<float>(GetBlockIdx()));
    SetAtomicMax<float>();
    copy_out(sums.tensor(), tensor, 1);
    SetAtomicMin<float>();
    copy_out(sums.tensor()[1], tensor, 1);
    SetAtomicNone();
  };
  sums.values.assign(64, 1.0f);
  CHECK_PASSES(run([&] { largest(true); }, buffers, 4));
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
