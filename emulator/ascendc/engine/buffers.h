// The parts of local memory that a kernel has allocated with TPipe::InitBuffer or LocalMemAllocator.
#pragma once

#include <cstdint>

namespace rec_sdk::emulator {

constexpr uint32_t kUbBlock = 32;  // all addresses except addresses of the scalar unit are multiples of it

constexpr uint64_t round_up_to_block(uint64_t bytes) { return (bytes + kUbBlock - 1) / kUbBlock * kUbBlock; }

// A tensor in local memory, as the functions of engine/ use it. The generation of a buffer changes with each
// allocation, so a tensor that was freed or whose pipe was destroyed no longer matches its buffer.
struct UbTensor {
  uint32_t address = 0;
  uint32_t bytes = 0;  // number of bytes from the address to the end of the tensor
  uint32_t generation = 0;
  uint16_t buffer = 0;  // index in LocalBuffers; kNoBuffer for LocalMemAllocator
  uint8_t position = 0;
};

constexpr uint8_t kVecCalc = 11;  // the value of TPosition::VECCALC
constexpr uint16_t kNoBuffer = UINT16_MAX;
constexpr int kMaxBuffers = 64;

enum class BufferState : uint8_t { kFree, kAllocated, kQueued, kDequeued, kScratch };

struct LocalBuffer {
  uint32_t address;
  uint32_t bytes;
  uint32_t generation;
  BufferState state;
  uint8_t position;
  int8_t ready_id;  // id of the flag that EnQue set, or -1
  int8_t free_id;   // id of the flag that FreeTensor set, or -1
  int8_t free_event;
};

struct LocalBuffers {
  LocalBuffer items[kMaxBuffers];
  int count = 0;
  uint32_t used_bytes = 0;
  bool piped = false;            // whether a TPipe exists
  bool static_tensors = false;   // whether a LocalMemAllocator was used
  uint32_t pipe = 1;             // changes when all buffers are released
  uint32_t next_generation = 1;  // never reset, so that old tensors cannot match

  // Returns whether the tensor still owns its memory.
  bool has(const UbTensor& tensor) const {
    return tensor.buffer == kNoBuffer ||
           (tensor.buffer < count && items[tensor.buffer].generation == tensor.generation);
  }
  void drop() {
    count = 0;
    used_bytes = 0;
    ++pipe;
  }
  void clear() {
    drop();
    piped = static_tensors = false;
  }
};

}  // namespace rec_sdk::emulator
