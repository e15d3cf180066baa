// A model of a device, which runs operations only when it is stepped: streams of operations, memory
// allocators that reuse memory, and a hash of the whole state. It guarantees what CUDA and torch's allocators
// guarantee, and no more.
//
// There are two models. In the stepped model, an operation may run at any time that its stream and the events
// it waits for permit. In the model by clocks, an operation runs when it is launched, and all operations that
// access the same memory must be ordered by streams, events and waits of the host. If they are, every
// possible order of operations has the same result.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace rec_sdk {

// A hash of 128 bits, so that two different states never have the same hash.
class Hash {
 public:
  using Value = std::pair<uint64_t, uint64_t>;

  Hash() = default;
  Hash(std::initializer_list<uint64_t> words) {
    for (const uint64_t word : words) add(word);
  }
  void add(uint64_t word) {
    a_ = mix((a_ ^ word) + 0x9E3779B97F4A7C15);
    b_ = mix((b_ + word) ^ 0xC2B2AE3D27D4EB4F);
  }
  void add(const Value& value) {
    add(value.first);
    add(value.second);
  }
  void add_bytes(const char* bytes, size_t count) {
    for (size_t i = 0; i < count; i += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + i, std::min(sizeof word, count - i));
      add(word);
    }
  }
  Value value() const { return {a_, b_}; }
  uint64_t word() const { return a_; }

 private:
  static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }
  uint64_t a_ = 1, b_ = 2;
};

struct Event {  // the first `count` operations of the stream are done
  int stream = -1;
  int64_t count = 0;
};

constexpr int kStreams = 4;  // two compute streams, one for uploads, one for downloads
constexpr int kInward = 2, kOutward = 3;

// A vector clock: for each stream, the number of operations that are certainly done.
class Clock {
 public:
  bool has(const Event& event) const { return event.stream < 0 || counts_[event.stream] >= event.count; }
  void join(const Clock& other) {
    for (int s = 0; s < kStreams; ++s) counts_[s] = std::max(counts_[s], other.counts_[s]);
  }
  void reach(const Event& event) { counts_[event.stream] = event.count; }
  void add_to(Hash* hash) const {
    for (const int64_t count : counts_) hash->add(static_cast<uint64_t>(count));
  }

 private:
  std::array<int64_t, kStreams> counts_{};
};

// The uses of some memory: the last operation that wrote it, and the operations that have read it since.
struct Uses {
  Event write;
  std::vector<Event> reads;
  bool ordered_before(const Clock& clock, bool writes) const {
    const auto has = [&clock](const Event& event) { return clock.has(event); };
    return clock.has(write) && (!writes || std::all_of(reads.begin(), reads.end(), has));
  }
  void add(const Event& event, bool writes) {
    if (writes) {
      write = event;
      reads.clear();
    } else {
      reads.push_back(event);
    }
  }
  void add_to(Hash* hash) const {
    hash->add(Hash{uint64_t(write.stream), uint64_t(write.count)}.word());
    for (const Event& read : reads) hash->add(Hash{uint64_t(read.stream), uint64_t(read.count)}.word());
  }
};

// Memory from an allocator. `content` represents its bytes in hashes.
struct Block {
  std::vector<char> bytes;
  uint64_t content = 0;
  uint64_t name = 0;
  int stream = -1;                 // the stream for which it was allocated; -1 for staging buffers
  bool held = true, free = false;  // `held`: it has an owner; `free`: it may have another owner
  std::vector<Event> until;        // events before which it is not free
  std::vector<int> recorded;       // streams that were passed to record_stream()
  Uses uses;
};
using Buffer = std::shared_ptr<Block>;

struct Touch {
  Block* block;  // null for a slot of the cache
  size_t slot;
  bool writes;
};
inline Touch reads(const Block* block) { return {const_cast<Block*>(block), 0, false}; }
inline Touch writes(Block* block) { return {block, 0, true}; }
inline Touch reads_slot(int32_t slot) { return {nullptr, static_cast<size_t>(slot), false}; }
inline Touch writes_slot(int32_t slot) { return {nullptr, static_cast<size_t>(slot), true}; }

class Device {
 public:
  // polled: streams whose operations are done for the host only after a step. In the model by clocks,
  // operations of other streams are done for the host as soon as they are launched.
  Device(int64_t slots, bool by_clocks, std::vector<int> polled)
      : cache(static_cast<size_t>(slots), -99), by_clocks_(by_clocks), slots_(cache.size()) {
    for (const int stream : polled) streams_[stream].polled = true;
  }

  // ---- Calls of the host

  // Allocates host memory (stream -1), or device memory for a stream. Memory is never really reused; instead,
  // it is overwritten as soon as it is free, as another owner might do.
  Buffer take(int stream, uint64_t name, size_t bytes) {
    blocks_.push_back(std::make_unique<Block>());
    Block* const block = blocks_.back().get();
    block->bytes.resize(bytes);
    block->stream = stream;
    block->name = name;
    return Buffer(block, [this](Block* given) { give_back(given); });
  }
  // Makes the next operation of `stream` wait for the event.
  void wait(int stream, const Event& event) { streams_[stream].waits.push_back(event); }
  Event tail(int stream) const { return {stream, streams_[stream].launched}; }
  bool done(const Event& event) const {
    return event.stream < 0 || streams_[event.stream].over >= event.count;
  }
  void waited(const Event& event) {  // the host has waited for the event
    if (by_clocks_ && event.stream >= 0) host_.join(clock_of(event));
  }
  void host_reads(const Block& block) {
    if (by_clocks_ && !block.uses.ordered_before(host_, false)) {
      complain("the host reads memory that an operation may still write");
    }
  }
  // Launches an operation. `run` must depend only on the device and `what`.
  void launch(int stream, const char* name, std::initializer_list<uint64_t> what, std::vector<Touch> touches,
              std::function<void()> run) {
    Hash hash(what);
    for (const Touch& touch : touches) hash.add(touch.block == nullptr ? touch.slot : touch.block->name);
    hash.add_bytes(name, std::strlen(name));
    Stream& given = streams_[stream];
    ++given.launched;
    Operation operation{name, hash.word(), std::exchange(given.waits, {}), std::move(touches),
                        std::move(run)};
    if (!by_clocks_) {
      given.queue.push_back(std::move(operation));
      return;
    }
    order(stream, operation);
    operation.run();
    if (!given.polled) given.over = given.launched;
  }

  // ---- Steps of the device, possible at any time

  bool ready(int stream) const {
    if (by_clocks_) return streams_[stream].over < streams_[stream].launched;
    return !streams_[stream].queue.empty() && all_done(streams_[stream].queue.front().after);
  }
  const char* next(int stream) const {
    return by_clocks_ ? "one is over" : streams_[stream].queue.front().name;
  }
  void step(int stream) {
    if (!by_clocks_) {
      const Operation operation = std::move(streams_[stream].queue.front());
      streams_[stream].queue.pop_front();
      for (const Touch& touch : operation.touches) {
        if (touch.block != nullptr && touch.block->free) {
          complain(std::string(operation.name) + " uses memory that another may have");
        }
      }
      operation.run();
    }
    ++streams_[stream].over;
    for (const std::unique_ptr<Block>& block : blocks_) free_if_done(block.get());
  }

  // ---- The whole state

  bool idle() const {
    return std::all_of(streams_.begin(), streams_.end(),
                       [](const Stream& s) { return s.over == s.launched; });
  }
  int64_t held() const {  // returns the number of blocks with an owner
    return std::count_if(blocks_.begin(), blocks_.end(), [](const auto& block) { return block->held; });
  }
  void add_to(Hash* hash) const;
  void add_event(const Event& event, Hash* hash) const {
    hash->add(Hash{uint64_t(event.stream), uint64_t(event.count)}.word());
    if (by_clocks_ && event.stream >= 0) clock_of(event).add_to(hash);
  }
  const std::string& problem() const { return problem_; }
  void complain(const std::string& text) {
    if (problem_.empty()) problem_ = text;
  }

  std::vector<float> cache;
  bool frees_early = false;  // a planted mistake: staging buffers are free too early

 private:
  struct Operation {
    const char* name;
    uint64_t what;
    std::vector<Event> after;
    std::vector<Touch> touches;
    std::function<void()> run;
  };
  struct Stream {
    std::deque<Operation> queue;
    std::vector<Event> waits;  // events for which the next operation waits
    int64_t launched = 0, over = 0;
    bool polled = false;
    Clock clock;                // clock of its latest operation
    std::vector<Clock> clocks;  // of each operation
  };

  const Clock& clock_of(const Event& event) const {
    static const Clock none;
    return event.count == 0 ? none : streams_[event.stream].clocks[static_cast<size_t>(event.count - 1)];
  }
  void order(int stream, const Operation& operation) {
    Stream& given = streams_[stream];
    given.clock.join(host_);
    for (const Event& event : operation.after) given.clock.join(clock_of(event));
    const Event own = tail(stream);
    for (const Touch& touch : operation.touches) {
      Uses& uses = touch.block == nullptr ? slots_[touch.slot] : touch.block->uses;
      if (!uses.ordered_before(given.clock, touch.writes)) {
        complain(std::string(operation.name) + " does not wait for what used the same memory before");
      }
      uses.add(own, touch.writes);
    }
    given.clock.reach(own);
    given.clocks.push_back(given.clock);
  }
  bool all_done(const std::vector<Event>& events) const {
    return std::all_of(events.begin(), events.end(), [this](const Event& event) { return done(event); });
  }
  // Returns memory to its allocator, which must know all of its uses. The next owner may be any thread and,
  // for device memory, the stream for which it was allocated.
  void give_back(Block* block) {
    for (const int stream : block->recorded) block->until.push_back(tail(stream));
    block->held = false;
    if (frees_early && block->stream < 0) block->until.clear();
    if (!by_clocks_) return free_if_done(block);
    Clock next = host_;
    if (block->stream >= 0) next.join(streams_[block->stream].clock);
    for (const Event& event : block->until) next.join(clock_of(event));
    if (!block->uses.ordered_before(next, true))
      complain("memory is given back while an operation may use it");
    block->free = true;
  }
  void free_if_done(Block* block) {
    if (block->held || block->free || !all_done(block->until)) return;
    if (block->stream >= 0 && uses_left(*block)) return;
    block->free = true;
    std::fill(block->bytes.begin(), block->bytes.end(), kGarbage);
  }
  // Returns whether the stream of the memory still has operations that use it. They run before operations of
  // the next owner.
  bool uses_left(const Block& block) const {
    for (const Operation& operation : streams_[block.stream].queue) {
      for (const Touch& touch : operation.touches) {
        if (touch.block == &block) return true;
      }
    }
    return false;
  }

  static constexpr char kGarbage = 0x5B;
  bool by_clocks_;
  std::array<Stream, kStreams> streams_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Uses> slots_;
  Clock host_;
  std::string problem_;
};

inline void Device::add_to(Hash* hash) const {
  for (const Stream& stream : streams_) {
    hash->add(static_cast<uint64_t>(stream.over));
    hash->add(static_cast<uint64_t>(stream.launched));
    const auto add = [&](const std::vector<Event>& events) {
      for (const Event& event : events) {
        if (by_clocks_ || !done(event)) add_event(event, hash);
      }
      hash->add(~uint64_t{0});
    };
    for (const Operation& operation : stream.queue) {
      hash->add(operation.what);
      add(operation.after);
    }
    add(stream.waits);
    if (by_clocks_) stream.clock.add_to(hash);
  }
  uint64_t sum = 0;  // independent of the order, because threads allocate concurrently
  for (const std::unique_ptr<Block>& block : blocks_) {
    if (block->free) continue;
    Hash one{block->name, block->content, block->held};
    for (const int stream : block->recorded) one.add(static_cast<uint64_t>(stream));
    for (const Event& event : block->until) {
      if (by_clocks_ || !done(event)) add_event(event, &one);
    }
    if (by_clocks_) block->uses.add_to(&one);
    sum += one.word();
  }
  hash->add(sum);
  if (by_clocks_) {
    host_.add_to(hash);
    for (const Uses& uses : slots_) uses.add_to(hash);
  }
  for (const float value : cache) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    hash->add(bits);
  }
}

}  // namespace rec_sdk
