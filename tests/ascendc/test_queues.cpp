// Queues: their states, and the order they give.
#include "support.h"

namespace {

using Kernel = std::function<void(bool)>;

constexpr uint32_t kCount = 16, kBytes = kCount * sizeof(float);

void test_a_pipeline() {
  Global<float> in("in", 10 * kCount, Access::kRead), out("out", 10 * kCount, Access::kWrite);
  for (size_t i = 0; i < in.values.size(); ++i) in.values[i] = static_cast<float>(i);
  CHECK_PASSES(run(
      [&] {
        TPipe pipe;
        TQue<TPosition::VECIN, 1> incoming;
        TQue<TPosition::VECOUT, 1> outgoing;
        pipe.InitBuffer(incoming, 2, kBytes);
        pipe.InitBuffer(outgoing, 2, kBytes);
        for (uint32_t i = 0; i < 10; ++i) {
          auto x = incoming.AllocTensor<float>();
          copy_in(x, in.tensor()[i * kCount], kCount);
          CHECK(incoming.EnQue(x));
          x = incoming.DeQue<float>();
          auto y = outgoing.AllocTensor<float>();
          Adds(y, x, 0.5f, static_cast<int32_t>(kCount));
          incoming.FreeTensor(x);
          outgoing.EnQue(y);
          y = outgoing.DeQue<float>();
          copy_out(out.tensor()[i * kCount], y, kCount);
          outgoing.FreeTensor(y);
        }
      },
      {in.buffer(), out.buffer()}));
  for (size_t i = 0; i < out.values.size(); ++i) CHECK(out.values[i] == static_cast<float>(i) + 0.5f);
}

void test_states() {
  const Kernel no_init = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    if (repaired) pipe.InitBuffer(queue, 1, kBytes);
    auto tensor = queue.AllocTensor<float>();
    queue.FreeTensor(tensor);
  };
  CHECK_TWIN(no_init, {}, 1, "AllocTensor", "the queue has no memory");
  const Kernel none_free = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 2, kBytes);
    auto first = queue.AllocTensor<float>(), second = queue.AllocTensor<float>();
    if (repaired) queue.FreeTensor(first);
    auto third = queue.AllocTensor<float>();
    queue.FreeTensor(second);
    queue.FreeTensor(third);
  };
  CHECK_TWIN(none_free, {}, 1, "AllocTensor", "none of the queue's 2 buffers is free");
  const Kernel empty = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, kBytes);
    auto tensor = queue.AllocTensor<float>();
    if (repaired) queue.EnQue(tensor);
    CHECK(queue.HasTensorInQue() == repaired);
    tensor = queue.DeQue<float>();
    queue.FreeTensor(tensor);
  };
  CHECK_TWIN(empty, {}, 1, "DeQue", "the queue is empty");
  const Kernel too_deep = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 2, kBytes);
    auto first = queue.AllocTensor<float>(), second = queue.AllocTensor<float>();
    queue.EnQue(first);
    CHECK(!queue.VacantInQue());
    if (repaired) first = queue.DeQue<float>();
    queue.EnQue(second);
    second = queue.DeQue<float>();
    queue.FreeTensor(first);
    queue.FreeTensor(second);
  };
  CHECK_TWIN(too_deep, {}, 1, "EnQue", "1 tensors are in the queue, whose depth is 1");
  const Kernel queued_twice = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 2> queue;
    pipe.InitBuffer(queue, 2, kBytes);
    auto tensor = queue.AllocTensor<float>();
    queue.EnQue(tensor);
    if (!repaired) queue.EnQue(tensor);
    tensor = queue.DeQue<float>();
    queue.FreeTensor(tensor);
  };
  CHECK_TWIN(queued_twice, {}, 1, "EnQue", "in the queue already");
}

void test_new_buffers() {
  const Kernel kernel = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, kBytes);
    auto tensor = queue.AllocTensor<float>();
    queue.EnQue(tensor);
    if (repaired) {
      tensor = queue.DeQue<float>();
      queue.FreeTensor(tensor);
    }
    pipe.InitBuffer(queue, 1, kBytes);
  };
  CHECK_TWIN(kernel, {}, 1, "InitBuffer", "1 tensors are still in the queue");
}

void test_freeing() {
  const Kernel freed_twice = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, kBytes);
    auto tensor = queue.AllocTensor<float>();
    queue.FreeTensor(tensor);
    if (!repaired) queue.FreeTensor(tensor);
  };
  CHECK_TWIN(freed_twice, {}, 1, "FreeTensor", "was freed before");
  const Kernel freed_in_queue = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, kBytes);
    auto tensor = queue.AllocTensor<float>();
    queue.EnQue(tensor);
    if (repaired) tensor = queue.DeQue<float>();
    queue.FreeTensor(tensor);
  };
  CHECK_TWIN(freed_in_queue, {}, 1, "FreeTensor", "is in the queue");
  const Kernel used_after = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECOUT, 1> queue;
    pipe.InitBuffer(queue, 1, kBytes);
    auto tensor = queue.AllocTensor<float>();
    if (repaired) Duplicate(tensor, 1.0f, 16);
    queue.FreeTensor(tensor);
    if (!repaired) Duplicate(tensor, 1.0f, 16);
  };
  CHECK_TWIN(used_after, {}, 1, "V, Duplicate", "that was freed");
  const Kernel never_freed = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 2, kBytes);
    auto tensor = queue.AllocTensor<float>();
    if (repaired) queue.FreeTensor(tensor);
  };
  CHECK_TWIN(never_freed, {}, 1, "TPipe::Destroy", "64 bytes, is allocated when its pipe ends");
  const Kernel left_in_queue = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 2, kBytes);
    auto tensor = queue.AllocTensor<float>();
    queue.EnQue(tensor);
    if (!repaired) return;
    tensor = queue.DeQue<float>();
    queue.FreeTensor(tensor);
  };
  CHECK_TWIN(left_in_queue, {}, 1, "is in the queue when its pipe ends");
  const Kernel other_queue = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> one, other;
    pipe.InitBuffer(one, 1, kBytes);
    pipe.InitBuffer(other, 1, kBytes);
    auto tensor = one.AllocTensor<float>();
    repaired ? one.FreeTensor(tensor) : other.FreeTensor(tensor);
  };
  CHECK_TWIN(other_queue, {}, 1, "FreeTensor", "is not of this queue");
  const Kernel into_other_queue = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> one, other;
    pipe.InitBuffer(one, 1, kBytes);
    pipe.InitBuffer(other, 1, kBytes);
    auto tensor = one.AllocTensor<float>();
    auto& queue = repaired ? one : other;
    queue.EnQue(tensor);
    tensor = queue.DeQue<float>();
    queue.FreeTensor(tensor);
  };
  CHECK_TWIN(into_other_queue, {}, 1, "EnQue", "is not of this queue");
}

// A queue orders the two engines of its positions, and no others.
void test_order() {
  Global<float> in("in", kCount, Access::kRead), out("out", kCount, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  const Kernel no_queue_between = [&](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    TBuf<> sums;
    pipe.InitBuffer(queue, 1, kBytes);
    pipe.InitBuffer(sums, kBytes);
    auto tensor = queue.AllocTensor<float>();
    copy_in(tensor, in.tensor(), kCount);
    if (repaired) {
      queue.EnQue(tensor);
      tensor = queue.DeQue<float>();
    }
    Adds(sums.Get<float>(), tensor, 1.0f, static_cast<int32_t>(kCount));
    queue.FreeTensor(tensor);
  };
  CHECK_TWIN(no_queue_between, buffers, 1, "HardEvent::MTE2_V");
  // VECIN is for the vector unit: what goes straight out again needs TQueBind.
  const Kernel wrong_position = [&](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> incoming;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> through;
    pipe.InitBuffer(incoming, 2, kBytes);
    pipe.InitBuffer(through, 2, kBytes);
    auto tensor = repaired ? through.AllocTensor<float>() : incoming.AllocTensor<float>();
    copy_in(tensor, in.tensor(), kCount);
    repaired ? through.EnQue(tensor) : incoming.EnQue(tensor);
    tensor = repaired ? through.DeQue<float>() : incoming.DeQue<float>();
    copy_out(out.tensor(), tensor, kCount);
    repaired ? through.FreeTensor(tensor) : incoming.FreeTensor(tensor);
  };
  CHECK_TWIN(wrong_position, buffers, 1, "MTE3, DataCopyPad", "HardEvent::MTE2_MTE3");
  // FreeTensor before the last use: the next copy in may come too early.
  const Kernel freed_too_early = [&](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    TBuf<> sums;
    pipe.InitBuffer(queue, 1, kBytes);
    pipe.InitBuffer(sums, kBytes);
    auto tensor = queue.AllocTensor<float>();
    copy_in(tensor, in.tensor(), kCount);
    queue.EnQue(tensor);
    tensor = queue.DeQue<float>();
    if (!repaired) queue.FreeTensor(tensor);
    Adds(sums.Get<float>(), tensor, 1.0f, static_cast<int32_t>(kCount));
    if (repaired) queue.FreeTensor(tensor);
  };
  CHECK_TWIN(freed_too_early, buffers, 1, "V, Adds", "was freed");
}

// Every tensor that is queued, or freed and not allocated again, holds one of 8 flags.
void test_flags_run_out() {
  const Kernel kernel = [](bool repaired) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    const uint8_t number = repaired ? 8 : 9;
    pipe.InitBuffer(queue, number, kBytes);
    for (int i = 0; i < number; ++i) {
      auto tensor = queue.AllocTensor<float>();
      queue.FreeTensor(tensor);
    }
  };
  CHECK_TWIN(kernel, {}, 1, "all 8 flags V_MTE2 are taken");
}

void test_bound_positions() {
  Global<float> in("in", kCount, Access::kRead, 3.0f), out("out", kCount, Access::kWrite);
  CHECK_PASSES(run(
      [&] {
        TPipe pipe;
        TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
        pipe.InitBuffer(queue, 1, kBytes);
        auto tensor = queue.AllocTensor<float>();
        copy_in(tensor, in.tensor(), kCount);
        queue.EnQue<TPosition::GM, TPosition::VECIN>(tensor);
        tensor = queue.DeQue<TPosition::GM, TPosition::VECIN, float>();
        Adds(tensor, tensor, 1.0f, static_cast<int32_t>(kCount));
        queue.EnQue<TPosition::VECOUT, TPosition::GM>(tensor);
        CHECK(queue.GetTensorCountInQue() == 1);
        tensor = queue.DeQue<TPosition::VECOUT, TPosition::GM, float>();
        copy_out(out.tensor(), tensor, kCount);
        CHECK(!queue.HasIdleBuffer());
        queue.FreeTensor(tensor);
        CHECK(queue.HasIdleBuffer());
        queue.FreeAllEvent();
      },
      {in.buffer(), out.buffer()}));
  for (const float value : out.values) CHECK(value == 4.0f);
}

}  // namespace

int main() {
  test_a_pipeline();
  test_states();
  test_new_buffers();
  test_freeing();
  test_order();
  test_flags_run_out();
  test_bound_positions();
  return check_result();
}
