// Accesses to local memory are ordered by flags, barriers and queues. Every pair of engines with a hazard
// between them.
#include "support.h"

namespace {

using Kernel = std::function<void(bool)>;

struct Memory {
  Memory() { pipe.InitBuffer(buffer, 1024); }

  LocalTensor<float> part(uint32_t number) { return buffer.Get<float>()[number * 64]; }

  TPipe pipe;
  TBuf<TPosition::VECIN> buffer;
};

constexpr int32_t kCount = 16;

void test_copy_in_then_vector() {
  Global<float> in("in", 64, Access::kRead, 1.0f);
  const Kernel read_after_write = [&](bool repaired) {
    Memory m;
    copy_in(m.part(0), in.tensor(), kCount);
    if (repaired) order<HardEvent::MTE2_V>();
    Adds(m.part(1), m.part(0), 1.0f, kCount);
  };
  CHECK_TWIN(read_after_write, {in.buffer()}, 1, "kernel 'kernel', core 0 of 1, V, Adds", "DataCopyPad (MTE2",
             "HardEvent::MTE2_V");
  const Kernel overwritten_while_read = [&](bool repaired) {
    Memory m;
    Duplicate(m.part(0), 1.0f, kCount);
    PipeBarrier<PIPE_V>();
    Adds(m.part(1), m.part(0), 1.0f, kCount);
    if (repaired) order<HardEvent::V_MTE2>();
    copy_in(m.part(0), in.tensor(), kCount);
  };
  CHECK_TWIN(overwritten_while_read, {in.buffer()}, 1, "MTE2, DataCopyPad", "HardEvent::V_MTE2");
  const Kernel overwritten_while_written = [&](bool repaired) {
    Memory m;
    Duplicate(m.part(0), 1.0f, kCount);
    if (repaired) order<HardEvent::V_MTE2>();
    copy_in(m.part(0), in.tensor(), kCount);
  };
  CHECK_TWIN(overwritten_while_written, {in.buffer()}, 1, "writes local memory", "Duplicate (V");
}

void test_vector_then_copy_out() {
  Global<float> out("out", 64, Access::kReadWrite);
  const Kernel read_after_write = [&](bool repaired) {
    Memory m;
    Duplicate(m.part(0), 1.0f, kCount);
    if (repaired) order<HardEvent::V_MTE3>();
    copy_out(out.tensor(), m.part(0), kCount);
  };
  CHECK_TWIN(read_after_write, {out.buffer()}, 1, "MTE3, DataCopyPad", "Duplicate (V", "HardEvent::V_MTE3");
  const Kernel overwritten_while_read = [&](bool repaired) {
    Memory m;
    Duplicate(m.part(0), 1.0f, kCount);
    order<HardEvent::V_MTE3>();
    copy_out(out.tensor(), m.part(0), kCount);
    if (repaired) order<HardEvent::MTE3_V>();
    Duplicate(m.part(0), 2.0f, kCount);
  };
  CHECK_TWIN(overwritten_while_read, {out.buffer()}, 1, "overwrites local memory", "DataCopyPad (MTE3",
             "HardEvent::MTE3_V");
}

void test_copy_in_and_copy_out() {
  Global<float> in("in", 64, Access::kRead, 1.0f), out("out", 64, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  const Kernel read_after_write = [&](bool repaired) {
    Memory m;
    copy_in(m.part(0), in.tensor(), kCount);
    if (repaired) order<HardEvent::MTE2_MTE3>();
    copy_out(out.tensor(), m.part(0), kCount);
  };
  CHECK_TWIN(read_after_write, buffers, 1, "MTE3, DataCopyPad", "HardEvent::MTE2_MTE3");
  const Kernel refilled_while_read = [&](bool repaired) {
    Memory m;
    copy_in(m.part(0), in.tensor(), kCount);
    order<HardEvent::MTE2_MTE3>();
    copy_out(out.tensor(), m.part(0), kCount);
    if (repaired) order<HardEvent::MTE3_MTE2>();
    copy_in(m.part(0), in.tensor(), kCount);
  };
  CHECK_TWIN(refilled_while_read, buffers, 1, "overwrites local memory", "HardEvent::MTE3_MTE2");
}

void test_scalar_unit() {
  Global<float> in("in", 64, Access::kRead, 1.0f), out("out", 64, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  const Kernel reads_copy = [&](bool repaired) {
    Memory m;
    copy_in(m.part(0), in.tensor(), kCount);
    if (repaired) order<HardEvent::MTE2_S>();
    CHECK(!repaired || m.part(0).GetValue(3) == 1.0f);
    if (!repaired) m.part(0).GetValue(3);
  };
  CHECK_TWIN(reads_copy, buffers, 1, "S, LocalTensor::GetValue", "HardEvent::MTE2_S");
  const Kernel reads_vector = [&](bool repaired) {
    Memory m;
    Duplicate(m.part(0), 1.0f, kCount);
    if (repaired) order<HardEvent::V_S>();
    m.part(0).GetValue(0);
  };
  CHECK_TWIN(reads_vector, buffers, 1, "HardEvent::V_S");
  const Kernel vector_reads_stored = [&](bool repaired) {
    Memory m;
    for (uint32_t i = 0; i < kCount; ++i) m.part(0).SetValue(i, 1.0f);
    if (repaired) order<HardEvent::S_V>();
    Adds(m.part(1), m.part(0), 1.0f, kCount);
  };
  CHECK_TWIN(vector_reads_stored, buffers, 1, "LocalTensor::SetValue (S", "HardEvent::S_V");
  const Kernel copies_stored = [&](bool repaired) {
    Memory m;
    m.part(0).SetValue(0, 1.0f);
    if (repaired) order<HardEvent::S_MTE3>();
    copy_out(out.tensor(), m.part(0), 1);
  };
  CHECK_TWIN(copies_stored, buffers, 1, "HardEvent::S_MTE3");
  const Kernel refills_what_is_read = [&](bool repaired) {
    Memory m;
    copy_in(m.part(0), in.tensor(), kCount);
    order<HardEvent::MTE2_S>();
    m.part(0).GetValue(0);
    if (repaired) order<HardEvent::S_MTE2>();
    copy_in(m.part(0), in.tensor(), kCount);
  };
  CHECK_TWIN(refills_what_is_read, buffers, 1, "HardEvent::S_MTE2");
  const Kernel stores_what_is_copied = [&](bool repaired) {
    Memory m;
    Duplicate(m.part(0), 1.0f, kCount);
    order<HardEvent::V_MTE3>();
    copy_out(out.tensor(), m.part(0), kCount);
    if (repaired) order<HardEvent::MTE3_S>();
    m.part(0).SetValue(0, 2.0f);
  };
  CHECK_TWIN(stores_what_is_copied, buffers, 1, "HardEvent::MTE3_S");
}

void test_vector_after_vector() {
  const Kernel read_after_write = [](bool repaired) {
    Memory m;
    Duplicate(m.part(0), 1.0f, kCount);
    if (repaired) PipeBarrier<PIPE_V>();
    Adds(m.part(1), m.part(0), 1.0f, kCount);
  };
  CHECK_TWIN(read_after_write, {}, 1, "Duplicate (V", "PipeBarrier<PIPE_V>");
  const Kernel write_after_read = [](bool repaired) {
    Memory m;
    Duplicate(m.part(0), 1.0f, kCount);
    PipeBarrier<PIPE_V>();
    Adds(m.part(1), m.part(0), 1.0f, kCount);
    if (repaired) PipeBarrier<PIPE_V>();
    Duplicate(m.part(0), 2.0f, kCount);
  };
  CHECK_TWIN(write_after_read, {}, 1, "overwrites", "Adds (V", "PipeBarrier<PIPE_V>");
  const Kernel write_after_write = [](bool repaired) {
    Memory m;
    Duplicate(m.part(0), 1.0f, kCount);
    if (repaired) PipeBarrier<PIPE_ALL>();
    Duplicate(m.part(0), 2.0f, kCount);
  };
  CHECK_TWIN(write_after_write, {}, 1, "writes local memory", "PipeBarrier<PIPE_V>");
  const Kernel wrong_barrier = [](bool repaired) {
    Memory m;
    Duplicate(m.part(0), 1.0f, kCount);
    repaired ? PipeBarrier<PIPE_V>() : PipeBarrier<PIPE_MTE2>();
    Adds(m.part(1), m.part(0), 1.0f, kCount);
  };
  CHECK_TWIN(wrong_barrier, {}, 1, "PipeBarrier<PIPE_V>");
}

void test_copy_after_copy() {
  Global<float> in("in", 64, Access::kRead, 1.0f);
  const Kernel same_target = [&](bool repaired) {
    Memory m;
    copy_in(m.part(0), in.tensor(), kCount);
    if (repaired) PipeBarrier<PIPE_MTE2>();
    copy_in(m.part(0), in.tensor()[1], kCount);
  };
  CHECK_TWIN(same_target, {in.buffer()}, 1, "PipeBarrier<PIPE_MTE2>");
  const Kernel tail_of_the_block = [&](bool repaired) {
    Memory m;
    copy_in(m.part(0), in.tensor(), kCount);
    // One float: the copy fills 32 bytes.
    copy_in(m.part(0)[repaired ? kCount : kCount - 8], in.tensor(), 1);
  };
  CHECK_TWIN(tail_of_the_block, {in.buffer()}, 1, "PipeBarrier<PIPE_MTE2>");
}

// An engine that waits for another knows all that the other has waited for.
void test_order_is_transitive() {
  Global<float> in("in", 64, Access::kRead, 1.0f), out("out", 64, Access::kReadWrite);
  const std::vector<Buffer> buffers = {in.buffer(), out.buffer()};
  const Kernel through_vector = [&](bool repaired) {
    Memory m;
    copy_in(m.part(0), in.tensor(), kCount);
    if (repaired) order<HardEvent::MTE2_V>();
    Duplicate(m.part(1), 1.0f, kCount);
    order<HardEvent::V_MTE3>();
    copy_out(out.tensor(), m.part(0), kCount);
  };
  CHECK_TWIN(through_vector, buffers, 1, "HardEvent::MTE2_MTE3");
  // The scalar unit issues what follows only after it waited.
  const Kernel through_scalar = [&](bool repaired) {
    Memory m;
    copy_in(m.part(0), in.tensor(), kCount);
    if (repaired) order<HardEvent::MTE2_S>();
    copy_out(out.tensor(), m.part(0), kCount);
  };
  CHECK_TWIN(through_scalar, buffers, 1, "HardEvent::MTE2_MTE3");
  // A flag stands for what its engine had been told when it was set, not for what came later.
  const Kernel flag_too_early = [&](bool repaired) {
    Memory m;
    Duplicate(m.part(0), 1.0f, kCount);
    if (!repaired) SetFlag<HardEvent::V_MTE3>(EVENT_ID1);
    Duplicate(m.part(1), 1.0f, kCount);
    if (repaired) SetFlag<HardEvent::V_MTE3>(EVENT_ID1);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID1);
    copy_out(out.tensor(), m.part(1), kCount);
  };
  CHECK_TWIN(flag_too_early, buffers, 1, "HardEvent::V_MTE3");
}

template <HardEvent kEvent>
void check_never_waited_for(const char* flag) {
  const Kernel kernel = [](bool repaired) {
    SetFlag<kEvent>(EVENT_ID0);
    if (repaired) WaitFlag<kEvent>(EVENT_ID0);
  };
  CHECK_TWIN(kernel, {}, 1, flag, "never waited for");
}

void test_flags_of_every_type_end_with_the_kernel() {
  check_never_waited_for<HardEvent::MTE2_V>("flag MTE2_V 0");
  check_never_waited_for<HardEvent::V_MTE2>("flag V_MTE2 0");
  check_never_waited_for<HardEvent::MTE3_V>("flag MTE3_V 0");
  check_never_waited_for<HardEvent::V_MTE3>("flag V_MTE3 0");
  check_never_waited_for<HardEvent::MTE3_MTE2>("flag MTE3_MTE2 0");
  check_never_waited_for<HardEvent::MTE2_MTE3>("flag MTE2_MTE3 0");
  check_never_waited_for<HardEvent::S_V>("flag S_V 0");
  check_never_waited_for<HardEvent::V_S>("flag V_S 0");
  check_never_waited_for<HardEvent::S_MTE2>("flag S_MTE2 0");
  check_never_waited_for<HardEvent::MTE2_S>("flag MTE2_S 0");
  check_never_waited_for<HardEvent::S_MTE3>("flag S_MTE3 0");
  check_never_waited_for<HardEvent::MTE3_S>("flag MTE3_S 0");
}

void test_flags() {
  const Kernel set_twice = [](bool repaired) {
    SetFlag<HardEvent::MTE2_V>(EVENT_ID3);
    if (repaired) {
      WaitFlag<HardEvent::MTE2_V>(EVENT_ID3);
      order<HardEvent::V_MTE2>();
    }
    SetFlag<HardEvent::MTE2_V>(EVENT_ID3);
    WaitFlag<HardEvent::MTE2_V>(EVENT_ID3);
  };
  CHECK_TWIN(set_twice, {}, 1, "MTE2, SetFlag", "flag MTE2_V 3 is already set");
  const Kernel never_set = [](bool repaired) {
    if (repaired) SetFlag<HardEvent::V_MTE3>(EVENT_ID1);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID1);
  };
  CHECK_TWIN(never_set, {}, 1, "MTE3, WaitFlag", "flag V_MTE3 1 is not set", "for ever");
  const Kernel other_id = [](bool repaired) {
    SetFlag<HardEvent::V_MTE3>(EVENT_ID1);
    WaitFlag<HardEvent::V_MTE3>(repaired ? EVENT_ID1 : EVENT_ID2);
  };
  CHECK_TWIN(other_id, {}, 1, "flag V_MTE3 2 is not set");
  const Kernel no_such_id = [](bool repaired) {
    SetFlag<HardEvent::S_V>(repaired ? 7 : 8);
    WaitFlag<HardEvent::S_V>(7);
  };
  CHECK_TWIN(no_such_id, {}, 1, "flag id 8 of S_V", "0 to 7");
}

// A WaitFlag that stands before a SetFlag in the source has not run before it: engines may be late.
void test_flags_set_again() {
  const auto signal = [](bool first) {
    SetFlag<HardEvent::S_MTE2>(first ? EVENT_ID0 : EVENT_ID1);
    WaitFlag<HardEvent::S_MTE2>(first ? EVENT_ID0 : EVENT_ID1);
  };
  const Kernel by_scalar_unit = [&](bool repaired) {
    signal(true);
    if (repaired) order<HardEvent::MTE2_S>();
    signal(true);
  };
  CHECK_TWIN(by_scalar_unit, {}, 1, "S, SetFlag", "sets flag S_MTE2 0 again", "MTE2, instruction 2",
             "MTE2_S");
  const Kernel two_flags = [&](bool repaired) {
    signal(true);
    signal(!repaired);
  };
  CHECK_TWIN(two_flags, {}, 1, "sets flag S_MTE2 0 again");
  const Kernel other_engine_knows = [&](bool repaired) {
    order<HardEvent::MTE2_V>();
    order<HardEvent::V_MTE3>();
    if (repaired) order<HardEvent::MTE3_MTE2>();
    order<HardEvent::MTE2_V>();
  };
  CHECK_TWIN(other_engine_knows, {}, 1, "MTE2, SetFlag", "sets flag MTE2_V 0 again");
  const Kernel barrier = [&](bool repaired) {
    signal(true);
    if (repaired) {
      PipeBarrier<PIPE_ALL>();
    } else {
      PipeBarrier<PIPE_MTE2>();
    }
    signal(true);
  };
  CHECK_TWIN(barrier, {}, 1, "sets flag S_MTE2 0 again");
  // The scalar unit has passed its own waits.
  CHECK_PASSES(run([] {
    order<HardEvent::MTE2_S>();
    order<HardEvent::MTE2_S>();
  }));
}

void test_flag_ids_of_the_pipe() {
  const Kernel all_taken = [](bool repaired) {
    TPipe pipe;
    for (int i = 0; i < 9; ++i) {
      const TEventID id = pipe.AllocEventID<HardEvent::V_S>();
      CHECK(id == (repaired ? 0 : i));
      if (repaired) pipe.ReleaseEventID<HardEvent::V_S>(id);
    }
  };
  CHECK_TWIN(all_taken, {}, 1, "all 8 flags V_S are taken");
  const Kernel released_twice = [](bool repaired) {
    TPipe pipe;
    const TEventID id = pipe.AllocEventID<HardEvent::V_S>();
    pipe.ReleaseEventID<HardEvent::V_S>(id);
    if (!repaired) pipe.ReleaseEventID<HardEvent::V_S>(id);
  };
  CHECK_TWIN(released_twice, {}, 1, "flag V_S 0 is not allocated");
  CHECK_PASSES(run([] {
    TPipe pipe;
    CHECK(pipe.FetchEventID(HardEvent::V_S) == 0);
    CHECK(pipe.FetchEventID<HardEvent::V_S>() == 0);
    CHECK(pipe.AllocEventID<HardEvent::V_S>() == 0);
    CHECK(pipe.FetchEventID(HardEvent::V_S) == 1);
  }));
}

}  // namespace

int main() {
  test_copy_in_then_vector();
  test_vector_then_copy_out();
  test_copy_in_and_copy_out();
  test_scalar_unit();
  test_vector_after_vector();
  test_copy_after_copy();
  test_order_is_transitive();
  test_flags();
  test_flags_of_every_type_end_with_the_kernel();
  test_flags_set_again();
  test_flag_ids_of_the_pipe();
  return check_result();
}
