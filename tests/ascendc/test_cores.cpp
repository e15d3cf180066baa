// Cores: which one runs, waiting for all, and what a failed launch leaves behind.
#include <set>
#include <stdexcept>

#include "emulator/ascendc/soc.h"
#include "support.h"

namespace {

using Kernel = std::function<void(bool)>;

void test_each_block_once() {
  std::vector<int64_t> order;
  CHECK_PASSES(run(
      [&] {
        CHECK(GetBlockNum() == 7);
        CHECK(GetSubBlockIdx() == 0 && GetTaskRatio() == 1);
        order.push_back(GetBlockIdx());
      },
      {}, 7));
  CHECK(order.size() == 7);
  CHECK(std::set<int64_t>(order.begin(), order.end()).size() == 7);
  CHECK_THROWS(rec_sdk::emulator::run_kernel("kernel", 0, {}, [] {}), std::invalid_argument);
  CHECK_THROWS(GetBlockIdx(), std::logic_error);
  // More blocks than cores is allowed, as long as they do not wait for each other.
  CHECK_PASSES(run([] {}, {}, 100));
}

void test_sync_all() {
  std::vector<int> phase(6);
  CHECK_PASSES(run(
      [&] {
        for (int i = 0; i < 3; ++i) {
          phase[static_cast<size_t>(GetBlockIdx())] = i;
          SyncAll();
          for (const int other : phase) CHECK(other == i);
          SyncAll();
        }
      },
      {}, 6));
  const Kernel one_stays_away = [](bool repaired) {
    if (repaired || GetBlockIdx() != 2) SyncAll();
  };
  CHECK_TWIN(one_stays_away, {}, 4, "S, SyncAll", "1 cores have ended without it");
  const Kernel one_stays_away_later = [](bool repaired) {
    SyncAll();
    if (repaired || GetBlockIdx() != 2) SyncAll();
  };
  CHECK_TWIN(one_stays_away_later, {}, 4, "1 cores have ended without it");
  const auto cores = rec_sdk::emulator::soc().vector_cores;
  CHECK(cores == 48);
  CHECK_PASSES(run([] { SyncAll(); }, {}, cores));
  CHECK_ERROR(run([] { SyncAll(); }, {}, cores + 1),
              "49 blocks wait for each other, but Ascend910B1 runs 48");
}

void test_soft_sync_all() {
  constexpr int64_t kBlocks = 3;
  Global<int32_t> workspace("workspace", kBlocks * 8, Access::kReadWrite);
  const auto sync = [&](uint32_t gm_elements, uint32_t ub_elements) {
    LocalMemAllocator<> allocator;
    GlobalTensor<int32_t> global;
    global.SetGlobalBuffer(workspace.values.data(), gm_elements);
    SyncAll(global, allocator.Alloc<int32_t>(ub_elements));
    SyncAll(global, allocator.Alloc<int32_t>(ub_elements), kBlocks);
  };
  const std::vector<Buffer> buffers = {workspace.buffer()};
  CHECK_PASSES(run([&] { sync(24, 24); }, buffers, kBlocks));
  CHECK_ERROR(run([&] { sync(16, 24); }, buffers, kBlocks), "SyncAll (soft)",
              "the global workspace has 64 bytes", "need 96");
  CHECK_ERROR(run([&] { sync(24, 16); }, buffers, kBlocks),
              "the local workspace has 64 bytes, 96 are needed");
  CHECK_ERROR(run(
                  [&] {
                    LocalMemAllocator<> allocator;
                    SyncAll(workspace.tensor(), allocator.Alloc<int32_t, 24>(), 2);
                  },
                  buffers, kBlocks),
              "usedCores 2 of 3");
  workspace.values[5] = 1;
  CHECK_ERROR(run([&] { sync(24, 24); }, buffers, kBlocks), "byte 20 of the global workspace is not zero");
}

// SyncAll waits for the engines of each core, too.
void test_sync_all_is_a_barrier() {
  Global<float> data("data", 64, Access::kReadWrite);
  CHECK_PASSES(run(
      [&] {
        LocalMemAllocator<> allocator;
        const auto x = allocator.Alloc<float, 16>();
        copy_in(x, data.tensor()[static_cast<uint64_t>(GetBlockIdx()) * 16], 16);
        SyncAll();
        Adds(x, x, 1.0f, 16);
        SyncAll();
        copy_out(data.tensor()[static_cast<uint64_t>(GetBlockIdx()) * 16], x, 16);
      },
      {data.buffer()}, 4));
  for (const float value : data.values) CHECK(value == 1.0f);
}

void test_after_an_error() {
  for (int i = 0; i < 3; ++i) {
    CHECK_ERROR(run(
                    [] {
                      TPipe pipe;
                      TQue<TPosition::VECIN, 1> queue;
                      pipe.InitBuffer(queue, 1, 32);
                      auto tensor = queue.AllocTensor<float>();
                      SyncAll();
                      if (GetBlockIdx() == 1) queue.DeQue<float>();
                      queue.FreeTensor(tensor);
                    },
                    {}, 3),
                "core 1 of 3", "the queue is empty");
    CHECK_PASSES(run([] { SyncAll(); }, {}, 3));
  }
  // The kernel's own exceptions come out as they are.
  CHECK_THROWS(rec_sdk::emulator::run_kernel("kernel", 2, {}, [] { throw std::out_of_range("mine"); }),
               std::out_of_range);
  CHECK_THROWS(rec_sdk::emulator::run_kernel("kernel", 1, {},
                                             [] { rec_sdk::emulator::run_kernel("inner", 1, {}, [] {}); }),
               std::logic_error);
}

}  // namespace

int main() {
  test_each_block_once();
  test_sync_all();
  test_soft_sync_all();
  test_sync_all_is_a_barrier();
  test_after_an_error();
  return check_result();
}
