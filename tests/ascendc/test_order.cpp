// Tests that accesses to local memory need the order of a flag or barrier, for every pair of engines that can
// have a hazard.
#include "support.h"

namespace {

struct Memory {
  Memory() { pipe.InitBuffer(buffer, 1024); }

  LocalTensor<float> part(uint32_t number) { return buffer.Get<float>()[number * 64]; }

  TPipe pipe;
  TBuf<TPosition::VECIN> buffer;
};

constexpr int32_t kCount = 16;

Global<float> input("in", 64, Access::kRead, 1.0f), output("out", 64, Access::kReadWrite);
const std::vector<Buffer> kBuffers = {input.buffer(), output.buffer()};

// Steps of a kernel: accesses to parts of local memory, and synchronization.
void in(Memory& m) { copy_in(m.part(0), input.tensor(), kCount); }
void out(Memory& m) { copy_out(output.tensor(), m.part(0), kCount); }
void fill(Memory& m) { Duplicate(m.part(0), 1.0f, kCount); }
void fill_next(Memory& m) { Duplicate(m.part(1), 1.0f, kCount); }
void out_next(Memory& m) { copy_out(output.tensor(), m.part(1), kCount); }
void add(Memory& m) { Adds(m.part(1), m.part(0), 1.0f, kCount); }
void get(Memory& m) { CHECK(m.part(0).GetValue(3) == 1.0f); }
void set(Memory& m) {
  for (uint32_t i = 0; i < kCount; ++i) m.part(0).SetValue(i, 1.0f);
}
template <HardEvent kEvent>
void flag(Memory&) {
  order<kEvent>();
}
template <pipe_t kPipe>
void barrier(Memory&) {
  PipeBarrier<kPipe>();
}

using Event = HardEvent;
constexpr auto kSignal = flag<Event::S_MTE2>;

const Steps<Memory> kHazards[] = {
    // a copy in and the vector unit
    {{in},
     {flag<Event::MTE2_V>},
     {add},
     {"kernel 'kernel', core 0 of 1, V, Adds", "DataCopyPad (MTE2", "HardEvent::MTE2_V"}},
    {{fill, barrier<PIPE_V>, add}, {flag<Event::V_MTE2>}, {in}, {"MTE2, DataCopyPad", "HardEvent::V_MTE2"}},
    {{fill}, {flag<Event::V_MTE2>}, {in}, {"writes local memory", "Duplicate (V"}},
    // a copy out and the vector unit
    {{fill}, {flag<Event::V_MTE3>}, {out}, {"MTE3, DataCopyPad", "Duplicate (V", "HardEvent::V_MTE3"}},
    {{fill, flag<Event::V_MTE3>, out},
     {flag<Event::MTE3_V>},
     {fill},
     {"overwrites local memory", "DataCopyPad (MTE3", "HardEvent::MTE3_V"}},
    // a copy in and a copy out
    {{in}, {flag<Event::MTE2_MTE3>}, {out}, {"MTE3, DataCopyPad", "HardEvent::MTE2_MTE3"}},
    {{in, flag<Event::MTE2_MTE3>, out},
     {flag<Event::MTE3_MTE2>},
     {in},
     {"overwrites local memory", "HardEvent::MTE3_MTE2"}},
    // another engine and the scalar unit
    {{in}, {flag<Event::MTE2_S>}, {get}, {"S, LocalTensor::GetValue", "HardEvent::MTE2_S"}},
    {{fill}, {flag<Event::V_S>}, {get}, {"HardEvent::V_S"}},
    {{set}, {flag<Event::S_V>}, {add}, {"LocalTensor::SetValue (S", "HardEvent::S_V"}},
    {{set}, {flag<Event::S_MTE3>}, {out}, {"HardEvent::S_MTE3"}},
    {{in, flag<Event::MTE2_S>, get}, {flag<Event::S_MTE2>}, {in}, {"HardEvent::S_MTE2"}},
    {{fill, flag<Event::V_MTE3>, out}, {flag<Event::MTE3_S>}, {set}, {"HardEvent::MTE3_S"}},
    // two instructions of the same engine
    {{fill}, {barrier<PIPE_V>}, {add}, {"Duplicate (V", "PipeBarrier<PIPE_V>"}},
    {{fill, barrier<PIPE_V>, add},
     {barrier<PIPE_V>},
     {fill},
     {"overwrites", "Adds (V", "PipeBarrier<PIPE_V>"}},
    {{fill}, {barrier<PIPE_ALL>}, {fill}, {"writes local memory", "PipeBarrier<PIPE_V>"}},
    {{fill, barrier<PIPE_MTE2>}, {barrier<PIPE_V>}, {add}, {"PipeBarrier<PIPE_V>"}},
    {{in}, {barrier<PIPE_MTE2>}, {in}, {"PipeBarrier<PIPE_MTE2>"}},
    // The copy out must wait for the copy in, but a chain of waits through another engine is enough. An
    // engine
    // that waits for another engine is also ordered after everything that the other engine has waited for.
    // The scalar unit issues later instructions only after its wait.
    {{in}, {flag<Event::MTE2_V>}, {fill_next, flag<Event::V_MTE3>, out}, {"HardEvent::MTE2_MTE3"}},
    {{in}, {flag<Event::MTE2_S>}, {out}, {"HardEvent::MTE2_MTE3"}},
    // A WaitFlag that precedes a SetFlag in the source may run after it, because engines may be late.
    {{kSignal},
     {flag<Event::MTE2_S>},
     {kSignal},
     {"S, SetFlag", "sets flag S_MTE2 0 again", "MTE2, instruction 4", "MTE2_S"}},
    {{flag<Event::MTE2_V>, flag<Event::V_MTE3>},
     {flag<Event::MTE3_MTE2>},
     {flag<Event::MTE2_V>},
     {"MTE2, SetFlag", "sets flag MTE2_V 0 again"}},
    {{kSignal, barrier<PIPE_MTE2>}, {barrier<PIPE_ALL>}, {kSignal}, {"sets flag S_MTE2 0 again"}},
};

void test_hazards() {
  for (const Steps<Memory>& hazard : kHazards) hazard.check(kBuffers);
}

void test_copies_fill_whole_blocks() {
  twin({"PipeBarrier<PIPE_MTE2>"}, kBuffers, [&](bool repaired, Memory& m) {
    in(m);
    copy_in(m.part(0)[repaired ? kCount : kCount - 8], input.tensor(), 1);
  });
}

// A flag covers only the instructions that were issued to its engine before the flag was set.
void test_flag_too_early() {
  twin({"HardEvent::V_MTE3"}, kBuffers, [&](bool repaired, Memory& m) {
    fill(m);
    if (!repaired) SetFlag<Event::V_MTE3>(EVENT_ID1);
    fill_next(m);
    if (repaired) SetFlag<Event::V_MTE3>(EVENT_ID1);
    WaitFlag<Event::V_MTE3>(EVENT_ID1);
    out_next(m);
  });
}

template <HardEvent kEvent>
void check_never_waited_for(const char* flag) {
  twin({flag, "never waited for"}, [](bool repaired) {
    SetFlag<kEvent>(EVENT_ID0);
    if (repaired) WaitFlag<kEvent>(EVENT_ID0);
  });
}

void test_flags_of_every_type_end_with_the_kernel() {
  check_never_waited_for<Event::MTE2_V>("flag MTE2_V 0");
  check_never_waited_for<Event::V_MTE2>("flag V_MTE2 0");
  check_never_waited_for<Event::MTE3_V>("flag MTE3_V 0");
  check_never_waited_for<Event::V_MTE3>("flag V_MTE3 0");
  check_never_waited_for<Event::MTE3_MTE2>("flag MTE3_MTE2 0");
  check_never_waited_for<Event::MTE2_MTE3>("flag MTE2_MTE3 0");
  check_never_waited_for<Event::S_V>("flag S_V 0");
  check_never_waited_for<Event::V_S>("flag V_S 0");
  check_never_waited_for<Event::S_MTE2>("flag S_MTE2 0");
  check_never_waited_for<Event::MTE2_S>("flag MTE2_S 0");
  check_never_waited_for<Event::S_MTE3>("flag S_MTE3 0");
  check_never_waited_for<Event::MTE3_S>("flag MTE3_S 0");
}

void test_flags() {
  twin({"MTE2, SetFlag", "flag MTE2_V 3 is already set"}, [](bool repaired) {
    SetFlag<Event::MTE2_V>(EVENT_ID3);
    if (repaired) {
      WaitFlag<Event::MTE2_V>(EVENT_ID3);
      order<HardEvent::V_MTE2>();
    }
    SetFlag<Event::MTE2_V>(EVENT_ID3);
    WaitFlag<Event::MTE2_V>(EVENT_ID3);
  });
  twin({"MTE3, WaitFlag", "flag V_MTE3 1 is not set", "for ever"}, [](bool repaired) {
    if (repaired) SetFlag<Event::V_MTE3>(EVENT_ID1);
    WaitFlag<Event::V_MTE3>(EVENT_ID1);
  });
  twin({"flag V_MTE3 2 is not set"}, [](bool repaired) {
    SetFlag<Event::V_MTE3>(EVENT_ID1);
    WaitFlag<Event::V_MTE3>(repaired ? EVENT_ID1 : EVENT_ID2);
  });
  twin({"flag id 8 of S_V", "0 to 7"}, [](bool repaired) {
    SetFlag<Event::S_V>(repaired ? 7 : 8);
    WaitFlag<Event::S_V>(7);
  });
}

void test_flags_set_again() {
  twin({"sets flag S_MTE2 0 again"}, [](bool repaired, Memory& m) {
    kSignal(m);
    SetFlag<Event::S_MTE2>(repaired ? EVENT_ID1 : EVENT_ID0);
    WaitFlag<Event::S_MTE2>(repaired ? EVENT_ID1 : EVENT_ID0);
  });
  passes([](Memory& m) {  // the wait by the scalar unit makes the second SetFlag safe
    flag<Event::MTE2_S>(m);
    flag<Event::MTE2_S>(m);
  });
}

void test_flag_ids_of_the_pipe() {
  twin({"all 8 flags V_S are taken"}, [](bool repaired, TPipe& pipe) {
    for (int i = 0; i < 9; ++i) {
      const TEventID id = pipe.AllocEventID<HardEvent::V_S>();
      CHECK(id == (repaired ? 0 : i));
      if (repaired) pipe.ReleaseEventID<HardEvent::V_S>(id);
    }
  });
  twin({"flag V_S 0 is not allocated"}, [](bool repaired, TPipe& pipe) {
    const TEventID id = pipe.AllocEventID<HardEvent::V_S>();
    pipe.ReleaseEventID<HardEvent::V_S>(id);
    if (!repaired) pipe.ReleaseEventID<HardEvent::V_S>(id);
  });
  passes([](TPipe& pipe) {
    CHECK(pipe.FetchEventID(HardEvent::V_S) == 0);
    CHECK(pipe.FetchEventID<HardEvent::V_S>() == 0);
    CHECK(pipe.AllocEventID<HardEvent::V_S>() == 0);
    CHECK(pipe.FetchEventID(HardEvent::V_S) == 1);
  });
}

}  // namespace

int main() {
  test_hazards();
  test_copies_fill_whole_blocks();
  test_flag_too_early();
  test_flags();
  test_flags_of_every_type_end_with_the_kernel();
  test_flags_set_again();
  test_flag_ids_of_the_pipe();
  return check_result();
}
