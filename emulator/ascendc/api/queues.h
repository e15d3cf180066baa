// Queues of local memory. TPipe allocates local memory, and TQue passes parts of it from one engine to
// another, with a flag for each transfer.
#pragma once

#include "emulator/ascendc/api/flags.h"
#include "emulator/ascendc/api/tensors.h"
#include "emulator/ascendc/engine/queue.h"

namespace AscendC {

constexpr bool in_local_memory(TPosition position) {
  return position == TPosition::VECIN || position == TPosition::VECOUT || position == TPosition::VECCALC;
}

// Returns the types of flags that CANN's library uses for a queue from src to dst.
constexpr rec_sdk::emulator::QueueEvents queue_events(TPosition src, TPosition dst) {
  using namespace rec_sdk::emulator;
  if (src == TPosition::GM) {
    return {event_index(kMte2, kVector), event_index(kVector, kMte2)};
  }
  if (dst == TPosition::GM) {
    return {event_index(kVector, kMte3), event_index(kMte3, kVector)};
  }
  return {event_index(kMte2, kMte3), event_index(kMte3, kMte2)};
}

template <TPosition src, TPosition dst, int32_t depth, auto mask = 0>
class TQueBind {
 public:
  static constexpr TPosition srcPosition = src;
  static constexpr TPosition dstPosition = dst;
  static constexpr bool isTQue = true;

  static_assert(src == TPosition::GM || in_local_memory(src),
                "TQueBind: src must be GM, VECIN, VECOUT or VECCALC");
  static_assert(dst == TPosition::GM || in_local_memory(dst),
                "TQueBind: dst must be GM, VECIN, VECOUT or VECCALC");
  static_assert(!(src == TPosition::GM && dst == TPosition::GM), "TQueBind: src and dst cannot both be GM");
  static_assert(depth >= 1 && depth <= rec_sdk::emulator::Queue::kMaxDepth,
                "TQueBind: depths 1 to 8 are emulated; depth 0, tensors in place, is not");

  template <typename T>
  LocalTensor<T> AllocTensor() {
    return LocalTensor<T>(queue_.allocate());
  }
  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor) {
    queue_.free(tensor.memory());
  }
  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor) {
    return queue_.push(tensor.memory(), queue_events(src, dst).ready);
  }
  template <TPosition srcUserPos, TPosition dstUserPos, typename T>
  bool EnQue(const LocalTensor<T>& tensor) {
    return queue_.push(tensor.memory(), queue_events(srcUserPos, dstUserPos).ready);
  }
  template <typename T>
  LocalTensor<T> DeQue() {
    return LocalTensor<T>(queue_.pop(queue_events(src, dst).ready));
  }
  template <TPosition srcUserPos, TPosition dstUserPos, typename T>
  LocalTensor<T> DeQue() {
    return LocalTensor<T>(queue_.pop(queue_events(srcUserPos, dstUserPos).ready));
  }

  bool VacantInQue() { return queue_.queued() < depth; }
  bool HasTensorInQue() { return queue_.queued() > 0; }
  int32_t GetTensorCountInQue() { return queue_.queued(); }
  bool HasIdleBuffer() { return queue_.has_free(); }
  void FreeAllEvent() { queue_.free_flags(); }

 private:
  friend class TPipe;
  static constexpr TPosition buffer_position() {
    return src == TPosition::GM ? dst : dst == TPosition::GM ? src : dst;
  }

  rec_sdk::emulator::Queue queue_{queue_events(src, dst), depth};
};

template <TPosition pos, int32_t depth, auto mask = 0>
class TQue : public TQueBind<pos == TPosition::VECIN ? TPosition::GM : pos,
                             pos == TPosition::VECIN ? TPosition::VECIN : TPosition::GM, depth, mask> {
  static_assert(pos == TPosition::VECIN || pos == TPosition::VECOUT,
                "TQue: a queue of a vector core is at VECIN or VECOUT; TBuf is for VECCALC");
};

template <TPosition pos = TPosition::LCM>
class TBuf {
 public:
  static constexpr bool isTQue = false;
  static_assert(in_local_memory(pos), "TBuf: a vector core has VECIN, VECOUT and VECCALC");

  template <typename T>
  LocalTensor<T> Get() {
    return LocalTensor<T>(rec_sdk::emulator::scratch(buffer_));
  }
  // Returns a tensor of a multiple of 32 bytes.
  template <typename T>
  LocalTensor<T> Get(uint32_t len) {
    return LocalTensor<T>(rec_sdk::emulator::scratch_part(buffer_, 0, uint64_t{len} * sizeof(T)));
  }
  template <typename T>
  LocalTensor<T> GetWithOffset(uint32_t size, uint32_t bufOffset) {
    return LocalTensor<T>(rec_sdk::emulator::scratch_part(buffer_, bufOffset, uint64_t{size} * sizeof(T)));
  }

 private:
  friend class TPipe;
  rec_sdk::emulator::UbTensor buffer_;
};

class TPipe {
 public:
  TPipe() { rec_sdk::emulator::open_pipe(); }
  ~TPipe() { Destroy(); }
  TPipe(const TPipe&) = delete;
  TPipe& operator=(const TPipe&) = delete;

  void Init() {
    rec_sdk::emulator::open_pipe();
    destroyed_ = false;
  }

  template <class T>
  bool InitBuffer(T& que, uint8_t num, uint32_t len) {
    static_assert(T::isTQue, "TPipe::InitBuffer(que, num, len) is for queues; a TBuf takes a length alone");
    que.queue_.init(
        rec_sdk::emulator::init_buffers(num, len, static_cast<uint8_t>(T::buffer_position()), false), num);
    return true;
  }
  template <TPosition pos>
  bool InitBuffer(TBuf<pos>& buf, uint32_t len) {
    buf.buffer_ = rec_sdk::emulator::init_scratch(len, static_cast<uint8_t>(pos));
    return true;
  }

  template <HardEvent event>
  TEventID AllocEventID() {
    return static_cast<TEventID>(rec_sdk::emulator::allocate_flag(event_of(event)));
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id) {
    rec_sdk::emulator::release_flag(event_of(event), id);
  }
  // Returns the id of a flag that is free now, without reserving it.
  template <HardEvent event>
  TEventID FetchEventID() {
    return static_cast<TEventID>(rec_sdk::emulator::fetch_flag(event_of(event)));
  }
  TEventID FetchEventID(HardEvent event) {
    return static_cast<TEventID>(rec_sdk::emulator::fetch_flag(event_of(event)));
  }

  // Waits for all engines and ends the pipe. All queues must be empty and all tensors freed.
  void Destroy() {
    if (!destroyed_) {
      destroyed_ = true;
      rec_sdk::emulator::close_pipe();
    }
  }
  // Releases all buffers, so that InitBuffer can be called again.
  void Reset() { rec_sdk::emulator::reset_pipe(); }

 private:
  bool destroyed_ = false;
};

}  // namespace AscendC
