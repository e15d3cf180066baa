// Tests of queues: the states of their tensors, and the order of engines that they enforce.
#include "support.h"

namespace {

constexpr uint32_t kCount = 16, kBytes = kCount * sizeof(float);

void test_a_pipeline() {
  Global<float> in("in", 10 * kCount, Access::kRead), out("out", 10 * kCount, Access::kWrite);
  for (size_t i = 0; i < in.values.size(); ++i) in.values[i] = static_cast<float>(i);
  passes({in.buffer(), out.buffer()}, [&](TPipe& pipe) {
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
  });
  for (size_t i = 0; i < out.values.size(); ++i) CHECK(out.values[i] == static_cast<float>(i) + 0.5f);
}

struct Queues {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> queue;
  LocalTensor<float> tensors[2];
};

template <int kBuffers>
void init(Queues& q) {
  q.pipe.InitBuffer(q.queue, kBuffers, kBytes);
}
template <int kTensor>
void alloc(Queues& q) {
  q.tensors[kTensor] = q.queue.AllocTensor<float>();
}
template <int kTensor>
void enqueue(Queues& q) {
  q.queue.EnQue(q.tensors[kTensor]);
  CHECK(q.queue.HasTensorInQue() && !q.queue.VacantInQue());
}
template <int kTensor>
void dequeue(Queues& q) {
  q.tensors[kTensor] = q.queue.DeQue<float>();
  CHECK(!q.queue.HasTensorInQue() && q.queue.VacantInQue());
}
template <int kTensor>
void release(Queues& q) {
  q.queue.FreeTensor(q.tensors[kTensor]);
}
void fill(Queues& q) { Duplicate(q.tensors[0], 1.0f, 16); }

const Steps<Queues> kStates[] = {
    {{}, {init<1>}, {alloc<0>, release<0>}, {"AllocTensor", "the queue has no memory"}},
    {{init<2>, alloc<0>, alloc<1>},
     {release<0>},
     {alloc<0>, release<0>, release<1>},
     {"AllocTensor", "none of the queue's 2 buffers is free"}},
    {{init<1>, alloc<0>}, {enqueue<0>}, {dequeue<0>, release<0>}, {"DeQue", "the queue is empty"}},
    {{init<2>, alloc<0>, alloc<1>, enqueue<0>},
     {dequeue<0>},
     {enqueue<1>, dequeue<1>, release<0>, release<1>},
     {"EnQue", "1 tensors are in the queue, whose depth is 1"}},
    {{init<1>, alloc<0>, enqueue<0>},
     {dequeue<0>, release<0>},
     {init<1>},
     {"InitBuffer", "1 tensors are still in the queue"}},
    {{init<1>, alloc<0>, release<0>}, {alloc<0>}, {release<0>}, {"FreeTensor", "was freed before"}},
    {{init<1>, alloc<0>, enqueue<0>}, {dequeue<0>}, {release<0>}, {"FreeTensor", "is in the queue"}},
    {{init<1>, alloc<0>, release<0>}, {alloc<0>}, {fill, release<0>}, {"V, Duplicate", "that was freed"}},
    {{init<2>, alloc<0>}, {release<0>}, {}, {"TPipe::Destroy", "64 bytes, is allocated when its pipe ends"}},
    {{init<2>, alloc<0>, enqueue<0>}, {dequeue<0>, release<0>}, {}, {"is in the queue when its pipe ends"}},
};

void test_states() {
  for (const Steps<Queues>& states : kStates) states.check();
}

void test_queued_twice() {
  twin({"EnQue", "in the queue already"}, [](bool repaired, TPipe& pipe) {
    TQue<TPosition::VECIN, 2> queue;
    pipe.InitBuffer(queue, 2, kBytes);
    auto tensor = queue.AllocTensor<float>();
    queue.EnQue(tensor);
    if (!repaired) queue.EnQue(tensor);
    tensor = queue.DeQue<float>();
    queue.FreeTensor(tensor);
  });
}

void test_other_queues() {
  for (const bool freed : {true, false}) {
    twin({freed ? "FreeTensor" : "EnQue", "is not of this queue"}, [&](bool repaired, Queues& q) {
      TQue<TPosition::VECIN, 1> other;
      init<1>(q);
      q.pipe.InitBuffer(other, 1, kBytes);
      auto tensor = q.queue.AllocTensor<float>();
      auto& queue = repaired ? q.queue : other;
      if (!freed) {
        queue.EnQue(tensor);
        tensor = queue.DeQue<float>();
      }
      queue.FreeTensor(tensor);
    });
  }
}

// A queue orders the two engines of its positions, and no other engines.
void test_order() {
  Global<float> in("in", kCount, Access::kRead), out("out", kCount, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  const auto add = [&](Queues& q, bool queued, bool freed_early) {
    TBuf<> sums;
    init<1>(q);
    q.pipe.InitBuffer(sums, kBytes);
    alloc<0>(q);
    copy_in(q.tensors[0], in.tensor(), kCount);
    if (queued) {
      enqueue<0>(q);
      dequeue<0>(q);
    }
    if (freed_early) release<0>(q);
    Adds(sums.Get<float>(), q.tensors[0], 1.0f, static_cast<int32_t>(kCount));
    if (!freed_early) release<0>(q);
  };
  twin({"HardEvent::MTE2_V"}, buffers, [&](bool repaired, Queues& q) { add(q, repaired, false); });
  // FreeTensor must not precede the last use, because then the next copy in may overwrite the tensor.
  twin({"V, Adds", "was freed"}, buffers, [&](bool repaired, Queues& q) { add(q, true, !repaired); });
  // A queue at VECIN orders copies in and the vector unit. Data that is copied in and out again needs a
  // TQueBind.
  twin({"MTE3, DataCopyPad", "HardEvent::MTE2_MTE3"}, buffers, [&](bool repaired, TPipe& pipe) {
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
  });
}

// Each tensor that is queued, or was freed and is not allocated again, occupies one of 8 flags.
void test_flags_run_out() {
  twin({"all 8 flags V_MTE2 are taken"}, [](bool repaired, TPipe& pipe) {
    TQue<TPosition::VECIN, 1> queue;
    const uint8_t number = repaired ? 8 : 9;
    pipe.InitBuffer(queue, number, kBytes);
    for (int i = 0; i < number; ++i) {
      auto tensor = queue.AllocTensor<float>();
      queue.FreeTensor(tensor);
    }
  });
}

void test_bound_positions() {
  Global<float> in("in", kCount, Access::kRead, 3.0f), out("out", kCount, Access::kWrite);
  passes({in.buffer(), out.buffer()}, [&](TPipe& pipe) {
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
  });
  for (const float value : out.values) CHECK(value == 4.0f);
}

}  // namespace

int main() {
  test_a_pipeline();
  test_states();
  test_queued_twice();
  test_other_queues();
  test_order();
  test_flags_run_out();
  test_bound_positions();
  return check_result();
}
