// Tests of cores: block indices, SyncAll, and the state after a failed launch.
#include <set>
#include <stdexcept>

#include "emulator/ascendc/soc.h"
#include "support.h"

namespace {

void test_each_block_once() {
  std::vector<int64_t> order;
  passes({{}, 7}, [&] {
    CHECK(GetBlockNum() == 7);
    CHECK(GetSubBlockIdx() == 0 && GetTaskRatio() == 1);
    order.push_back(GetBlockIdx());
  });
  CHECK(order.size() == 7);
  CHECK(std::set<int64_t>(order.begin(), order.end()).size() == 7);
  CHECK_THROWS(rec_sdk::emulator::run_kernel("kernel", 0, {}, [] {}), std::invalid_argument);
  CHECK_THROWS(GetBlockIdx(), std::logic_error);
  // There may be more blocks than cores if the blocks do not wait for each other.
  passes({{}, 100}, [] {});
}

void test_sync_all() {
  std::vector<int> phase(6);
  passes({{}, 6}, [&] {
    for (int i = 0; i < 3; ++i) {
      phase[static_cast<size_t>(GetBlockIdx())] = i;
      SyncAll();
      for (const int other : phase) CHECK(other == i);
      SyncAll();
    }
  });
  twin({"S, SyncAll", "1 cores have ended without it"}, {{}, 4}, [](bool repaired) {
    if (repaired || GetBlockIdx() != 2) SyncAll();
  });
  twin({"1 cores have ended without it"}, {{}, 4}, [](bool repaired) {
    SyncAll();
    if (repaired || GetBlockIdx() != 2) SyncAll();
  });
  const auto cores = rec_sdk::emulator::soc().vector_cores;
  CHECK(cores == 48);
  passes({{}, cores}, [] { SyncAll(); });
  check_error(run([] { SyncAll(); }, {{}, cores + 1}),
              {"49 blocks wait for each other, but Ascend910B1 runs 48"});
}

void test_soft_sync_all() {
  constexpr int64_t kBlocks = 3;
  Global<int32_t> workspace("workspace", kBlocks * 8, Access::kReadWrite);
  const auto sync = [&](uint32_t gm_elements, uint32_t ub_elements) {
    Ub ub;
    GlobalTensor<int32_t> global;
    global.SetGlobalBuffer(workspace.values.data(), gm_elements);
    SyncAll(global, ub.Alloc<int32_t>(ub_elements));
    SyncAll(global, ub.Alloc<int32_t>(ub_elements), kBlocks);
  };
  const Launch launch = {{workspace.buffer()}, kBlocks};
  check_error(run([&] { sync(24, 24); }, launch), {});
  check_error(run([&] { sync(16, 24); }, launch),
              {"SyncAll (soft)", "the global workspace has 64 bytes", "need 96"});
  check_error(run([&] { sync(24, 16); }, launch), {"the local workspace has 64 bytes, 96 are needed"});
  twin({"usedCores 2 of 3"}, launch, [&](bool repaired, Ub& ub) {
    SyncAll(workspace.tensor(), ub.Alloc<int32_t, 24>(), repaired ? 3 : 2);
  });
  workspace.values[5] = 1;
  check_error(run([&] { sync(24, 24); }, launch), {"byte 20 of the global workspace is not zero"});
}

// SyncAll also waits for the engines of each core.
void test_sync_all_is_a_barrier() {
  Global<float> data("data", 64, Access::kReadWrite);
  passes({{data.buffer()}, 4}, [&](Ub& ub) {
    const auto x = ub.Alloc<float, 16>();
    copy_in(x, data.tensor()[static_cast<uint64_t>(GetBlockIdx()) * 16], 16);
    SyncAll();
    Adds(x, x, 1.0f, 16);
    SyncAll();
    copy_out(data.tensor()[static_cast<uint64_t>(GetBlockIdx()) * 16], x, 16);
  });
  for (const float value : data.values) CHECK(value == 1.0f);
}

void test_after_an_error() {
  for (int i = 0; i < 3; ++i) {
    twin({"core 1 of 3", "the queue is empty"}, {{}, 3}, [](bool repaired, TPipe& pipe) {
      TQue<TPosition::VECIN, 1> queue;
      pipe.InitBuffer(queue, 1, 32);
      auto tensor = queue.AllocTensor<float>();
      SyncAll();
      if (!repaired && GetBlockIdx() == 1) queue.DeQue<float>();
      queue.FreeTensor(tensor);
    });
  }
  // An exception that the kernel throws is rethrown unchanged.
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
