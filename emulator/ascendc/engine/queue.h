// The allocation of buffers in local memory, and the queues that pass them between engines.
#pragma once

#include <cstdint>

#include "emulator/ascendc/engine/buffers.h"

namespace rec_sdk::emulator {

void open_pipe();
void close_pipe();
void reset_pipe();

// Allocates `number` buffers of `bytes` bytes each, and returns the index of the first one.
int init_buffers(uint32_t number, uint64_t bytes, uint8_t position, bool scratch);
UbTensor init_scratch(uint64_t bytes, uint8_t position);
// Returns the tensor of a TBuf. Fails unless InitBuffer has allocated it.
UbTensor scratch(const UbTensor& buffer);
// Returns bytes [offset, offset + bytes) of the tensor of a TBuf.
UbTensor scratch_part(const UbTensor& buffer, uint64_t offset, uint64_t bytes);
UbTensor allocate_static(uint32_t& head, uint64_t bytes, uint8_t position);

int allocate_flag(int event);
void release_flag(int event, int32_t id);
int fetch_flag(int event);

// The types of a queue's flags, as indices into kEvents. EnQue sets `ready` and DeQue waits for it;
// FreeTensor sets `free` and AllocTensor waits for it.
struct QueueEvents {
  int ready, free;
};

class Queue {
 public:
  static constexpr int kMaxDepth = 8;

  Queue(QueueEvents events, int depth) : events_(events), depth_(depth) {}

  void init(int first, int number);
  UbTensor allocate();
  bool push(const UbTensor& tensor, int event);
  UbTensor pop(int event);
  void free(const UbTensor& tensor);
  int queued() const { return queued_; }
  bool has_free() const;
  void free_flags();

 private:
  void check_init(const char* call) const;
  LocalBuffer& owned(const UbTensor& tensor, const char* call) const;
  UbTensor tensor_of(int index) const;

  QueueEvents events_;
  int depth_;
  uint32_t pipe_ = 0;  // the value of LocalBuffers::pipe at the time of InitBuffer
  int first_ = 0;
  int number_ = 0;
  int cursor_ = 0;
  int queued_ = 0;
  int head_ = 0;
  uint8_t order_[kMaxDepth] = {};
};

}  // namespace rec_sdk::emulator
