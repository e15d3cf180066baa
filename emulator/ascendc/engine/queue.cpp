#include "emulator/ascendc/engine/queue.h"

#include <exception>

#include "emulator/ascendc/engine/core.h"
#include "emulator/ascendc/engine/text.h"
#include "emulator/ascendc/soc.h"

namespace rec_sdk::emulator {
namespace {

const char* state_name(BufferState state) {
  constexpr const char* kNames[] = {"free", "allocated", "in the queue", "taken from the queue", "a TBuf"};
  return kNames[static_cast<int>(state)];
}

// Waits for the flags of buffers that were freed and not allocated again, because nothing else consumes these
// flags.
void take_free_flags(Core& core, int first, int number) {
  for (int i = first; i < first + number; ++i) {
    LocalBuffer& buffer = core.buffers.items[i];
    if (buffer.free_id >= 0) {
      core.wait_flag(buffer.free_event, buffer.free_id);
      core.flags.release(buffer.free_event, buffer.free_id);
      buffer.free_id = -1;
    }
  }
}

// Checks that the pipe may be destroyed now.
void check_finished(const Core& core) {
  for (int i = 0; i < core.buffers.count; ++i) {
    const LocalBuffer& buffer = core.buffers.items[i];
    if (buffer.state != BufferState::kFree && buffer.state != BufferState::kScratch) {
      core.fail(text(
          "the tensor at local address %u, %u bytes, is %s when its pipe ends: FreeTensor must come first",
          buffer.address, buffer.bytes, state_name(buffer.state)));
    }
  }
}

}  // namespace

void open_pipe() {
  Core& core = current_core();
  core.issue(kScalar, "TPipe");
  if (core.buffers.piped) {
    core.fail("a second TPipe: a kernel has one at a time");
  }
  if (core.buffers.static_tensors) {
    core.fail("a TPipe cannot be used together with LocalMemAllocator");
  }
  core.buffers.piped = true;
}

void close_pipe() {
  if (running_core == nullptr || std::uncaught_exceptions() > 0) {
    return;  // the launch has failed already
  }
  Core& core = *running_core;
  try {
    core.issue(kScalar, "TPipe::Destroy");
    check_finished(core);
    take_free_flags(core, 0, core.buffers.count);
    core.barrier_all();
  } catch (const KernelError& error) {
    core.fail_later(error);
  }
  core.buffers.drop();
  core.buffers.piped = false;
}

void reset_pipe() {
  Core& core = current_core();
  core.issue(kScalar, "TPipe::Reset");
  check_finished(core);
  take_free_flags(core, 0, core.buffers.count);
  core.buffers.drop();
}

int init_buffers(uint32_t number, uint64_t bytes, uint8_t position, bool scratch) {
  Core& core = current_core();
  LocalBuffers& all = core.buffers;
  core.issue(kScalar, "InitBuffer");
  if (!all.piped) {
    core.fail("the TPipe was destroyed");
  }
  if (number == 0 || bytes == 0) {
    core.fail(text("%u buffers of %lu bytes: at least 1 of each", number, bytes));
  }
  if (all.count + number > kMaxBuffers) {
    core.fail(text("%u buffers after %d: a kernel has %d at most", number, all.count, kMaxBuffers));
  }
  const uint64_t rounded = round_up_to_block(bytes);
  const auto free_bytes = static_cast<uint64_t>(soc().ub_free_bytes);
  if (rounded * number > free_bytes - all.used_bytes) {
    core.fail(text("%u buffers of %lu bytes after %u bytes: %s leaves a kernel %lu bytes of local memory",
                   number, rounded, all.used_bytes, soc().name, free_bytes));
  }
  const int first = all.count;
  for (uint32_t i = 0; i < number; ++i) {
    const BufferState state = scratch ? BufferState::kScratch : BufferState::kFree;
    all.items[all.count++] = {
        all.used_bytes, static_cast<uint32_t>(rounded), all.next_generation++, state, position, -1, -1, -1};
    all.used_bytes += static_cast<uint32_t>(rounded);
  }
  return first;
}

namespace {

UbTensor whole_buffer(const Core& core, int index) {
  const LocalBuffer& buffer = core.buffers.items[index];
  return {buffer.address, buffer.bytes, buffer.generation, static_cast<uint16_t>(index), buffer.position};
}

}  // namespace

UbTensor init_scratch(uint64_t bytes, uint8_t position) {
  const int index = init_buffers(1, bytes, position, true);
  return whole_buffer(current_core(), index);
}

UbTensor scratch(const UbTensor& buffer) {
  if (buffer.bytes == 0) {
    Core& core = current_core();
    core.issue(kScalar, "TBuf::Get");
    core.fail("the TBuf has no memory: TPipe::InitBuffer must come first");
  }
  return buffer;
}

UbTensor scratch_part(const UbTensor& buffer, uint64_t offset, uint64_t bytes) {
  const UbTensor whole = scratch(buffer);
  if (bytes == 0 || bytes % kUbBlock != 0 || offset > whole.bytes || bytes > whole.bytes - offset) {
    Core& core = current_core();
    core.issue(kScalar, "TBuf::Get");
    core.fail(text("%lu bytes from byte %lu of a TBuf of %u: it must lie inside, and be a multiple of %u",
                   bytes, offset, whole.bytes, kUbBlock));
  }
  UbTensor part = whole;
  part.address += static_cast<uint32_t>(offset);
  part.bytes = static_cast<uint32_t>(bytes);
  return part;
}

UbTensor allocate_static(uint32_t& head, uint64_t bytes, uint8_t position) {
  Core& core = current_core();
  core.issue(kScalar, "LocalMemAllocator::Alloc");
  if (core.buffers.piped) {
    core.fail("LocalMemAllocator cannot be used together with a TPipe");
  }
  core.buffers.static_tensors = true;
  const uint64_t rounded = round_up_to_block(bytes);
  const auto free_bytes = static_cast<uint64_t>(soc().ub_free_bytes);
  if (bytes == 0 || rounded > free_bytes - head) {
    core.fail(text("%lu bytes after %u: %s leaves a kernel %lu bytes of local memory", bytes, head,
                   soc().name, free_bytes));
  }
  const UbTensor tensor{head, static_cast<uint32_t>(rounded), 0, kNoBuffer, position};
  head += static_cast<uint32_t>(rounded);
  return tensor;
}

int fetch_flag(int event) {
  Core& core = current_core();
  const int id = core.flags.free_id(event);
  if (id < 0) {
    core.issue(kScalar, "FetchEventID");
    core.fail(text("all %d flags %s are taken: every freed or queued tensor holds one", kEventIds,
                   kEvents[event].name));
  }
  return id;
}

int allocate_flag(int event) {
  const int id = fetch_flag(event);
  current_core().flags.allocate(event, id);
  return id;
}

void release_flag(int event, int32_t id) {
  Core& core = current_core();
  if (id < 0 || id >= kEventIds || !core.flags.is_allocated(event, id)) {
    core.issue(kScalar, "ReleaseEventID");
    core.fail(text("flag %s %d is not allocated", kEvents[event].name, id));
  }
  core.flags.release(event, id);
}

void Queue::init(int first, int number) {
  Core& core = current_core();
  if (pipe_ == core.buffers.pipe && queued_ > 0) {
    core.fail(text("%d tensors are still in the queue", queued_));
  }
  first_ = first;
  number_ = number;
  cursor_ = queued_ = head_ = 0;
  pipe_ = core.buffers.pipe;
}

void Queue::check_init(const char* call) const {
  Core& core = current_core();
  if (pipe_ != core.buffers.pipe) {
    core.issue(kScalar, call);
    core.fail("the queue has no memory: TPipe::InitBuffer must come first");
  }
}

UbTensor Queue::tensor_of(int index) const { return whole_buffer(current_core(), index); }

LocalBuffer& Queue::owned(const UbTensor& tensor, const char* call) const {
  Core& core = current_core();
  check_init(call);
  if (tensor.buffer < first_ || tensor.buffer >= first_ + number_) {
    core.issue(kScalar, call);
    core.fail(text("the tensor at local address %u is not of this queue", tensor.address));
  }
  LocalBuffer& buffer = core.buffers.items[tensor.buffer];
  if (buffer.generation != tensor.generation) {
    core.issue(kScalar, call);
    core.fail(text("the tensor at local address %u was freed before", tensor.address));
  }
  return buffer;
}

UbTensor Queue::allocate() {
  Core& core = current_core();
  check_init("AllocTensor");
  for (int tries = 0; tries < number_; ++tries) {
    const int index = first_ + cursor_;
    cursor_ = cursor_ + 1 == number_ ? 0 : cursor_ + 1;
    LocalBuffer& buffer = core.buffers.items[index];
    if (buffer.state == BufferState::kFree) {
      buffer.state = BufferState::kAllocated;
      buffer.generation = core.buffers.next_generation++;
      take_free_flags(core, index, 1);
      core.ub.mark_unwritten({buffer.address, buffer.bytes});
      return tensor_of(index);
    }
  }
  core.issue(kScalar, "AllocTensor");
  core.fail(text("none of the queue's %d buffers is free: the core waits for ever", number_));
}

bool Queue::push(const UbTensor& tensor, int event) {
  Core& core = current_core();
  LocalBuffer& buffer = owned(tensor, "EnQue");
  if (buffer.state != BufferState::kAllocated && buffer.state != BufferState::kDequeued) {
    core.issue(kScalar, "EnQue");
    core.fail(text("the tensor is %s already", state_name(buffer.state)));
  }
  if (queued_ == depth_) {
    core.issue(kScalar, "EnQue");
    core.fail(text("%d tensors are in the queue, whose depth is %d", queued_, depth_));
  }
  buffer.state = BufferState::kQueued;
  buffer.ready_id = static_cast<int8_t>(allocate_flag(event));
  core.set_flag(event, buffer.ready_id, true);
  order_[(head_ + queued_) % kMaxDepth] = static_cast<uint8_t>(tensor.buffer);
  ++queued_;
  return true;
}

UbTensor Queue::pop(int event) {
  Core& core = current_core();
  check_init("DeQue");
  if (queued_ == 0) {
    core.issue(kScalar, "DeQue");
    core.fail("the queue is empty");
  }
  const int index = order_[head_];
  LocalBuffer& buffer = core.buffers.items[index];
  head_ = (head_ + 1) % kMaxDepth;
  --queued_;
  buffer.state = BufferState::kDequeued;
  core.wait_flag(event, buffer.ready_id);
  core.flags.release(event, buffer.ready_id);
  buffer.ready_id = -1;
  return tensor_of(index);
}

void Queue::free(const UbTensor& tensor) {
  Core& core = current_core();
  LocalBuffer& buffer = owned(tensor, "FreeTensor");
  if (buffer.state == BufferState::kFree || buffer.state == BufferState::kQueued) {
    core.issue(kScalar, "FreeTensor");
    core.fail(text("the tensor at local address %u is %s", tensor.address, state_name(buffer.state)));
  }
  buffer.state = BufferState::kFree;
  buffer.generation = core.buffers.next_generation++;
  buffer.free_event = static_cast<int8_t>(events_.free);
  buffer.free_id = static_cast<int8_t>(allocate_flag(events_.free));
  core.set_flag(events_.free, buffer.free_id, true);
}

bool Queue::has_free() const {
  check_init("HasIdleBuffer");
  for (int i = first_; i < first_ + number_; ++i) {
    if (current_core().buffers.items[i].state == BufferState::kFree) {
      return true;
    }
  }
  return false;
}

void Queue::free_flags() {
  check_init("FreeAllEvent");
  take_free_flags(current_core(), first_, number_);
}

}  // namespace rec_sdk::emulator
