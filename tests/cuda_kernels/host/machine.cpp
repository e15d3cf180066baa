#include "tests/cuda_kernels/host/machine.h"

#include <link.h>

#include <algorithm>
#include <bitset>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "emulator/ascendc/engine/fiber.h"
#include "tests/cuda_kernels/host/cuda_runtime.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_host {
namespace {

using rec_sdk::emulator::Fiber;

constexpr int kWarp = 32, kMaxThreads = 1024;
constexpr unsigned kMaxBlocks = 0x7fffffffu;
constexpr uint32_t kWholeBlock = 0;  // mask of a call that waits for the whole block

struct Memory {
  void* data;
  size_t bytes;
};

thread_local char anchor;

// Returns the thread-local memory of the program or library that contains this code.
Memory shared_memory() {
  Memory found{&anchor, 0};  // taking the address allocates the thread-local memory
  const auto take_if_mine = [](dl_phdr_info* info, size_t, void* result) {
    auto* memory = static_cast<Memory*>(result);
    const auto address = reinterpret_cast<uintptr_t>(memory->data);
    const auto start = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& header = info->dlpi_phdr[i];
      if (header.p_type != PT_TLS || address < start || address - start >= header.p_memsz) continue;
      *memory = {info->dlpi_tls_data, header.p_memsz};
      return 1;
    }
    return 0;
  };
  dl_iterate_phdr(take_if_mine, &found);
  return found;
}

std::string name_of([[maybe_unused]] const void* kernel) {
  char name[1000] = "a kernel";
#ifdef __SANITIZE_ADDRESS__
  // __sanitizer_symbolize_pc treats its argument as a return address, so the kernel's address is incremented.
  void* behind = const_cast<char*>(static_cast<const char*>(kernel)) + 1;
  __sanitizer_symbolize_pc(behind, "%f", name, sizeof name);
#endif
  return name;
}

std::string text_of(const Call& call) {
  char mask[40] = "";
  if (call.mask != kWholeBlock) std::snprintf(mask, sizeof mask, " with mask 0x%08x", call.mask);
  return std::string(call.name) + mask + " at " + call.place.file + ":" + std::to_string(call.place.line);
}

// Returns whether two threads wait in the same call. Names and files are compared by address: they are
// literals of one translation unit, where equal literals have the same address.
bool same(const Call& a, const Call& b) {
  return a.mask == b.mask && a.name == b.name && a.place.file == b.place.file && a.place.line == b.place.line;
}

struct Thread {
  std::unique_ptr<Fiber> fiber;
  bool waiting = false, ended = false;
  Call call{};  // the call in which the thread waits
  uint64_t result = 0;
};

// The threads [first, last) that can take part in a call: a warp or the whole block.
struct Group {
  int first, last, index;
};

class Machine {
 public:
  uint64_t order = kAscending;
  std::string title;

  void run(const void* kernel, const dim3& grid, const dim3& block, const std::function<void()>& call);
  uint64_t wait(const Call& call);
  int lane() const { return current_ % kWarp; }
  [[noreturn]] void fail(const std::string& message) const;  // throws an error of the current thread
  std::string where() const;  // the current thread, for reports of the sanitizers

 private:
  std::vector<unsigned> order_of_blocks(unsigned blocks);
  void run_block();
  int next_thread();
  bool all_wait(const Call& call, const Group& group) const;
  void release(const Call& call, const Group& group);
  std::string deadlock() const;

  Group group_of(const Call& call, int thread) const {
    const int first = thread / kWarp * kWarp;
    if (call.mask == kWholeBlock) return {0, count_, kMaxThreads / kWarp};
    return {first, first + kWarp, thread / kWarp};
  }
  static bool names(const Call& call, int thread) {
    return call.mask == kWholeBlock || (call.mask >> (thread % kWarp) & 1u) != 0;
  }

  // Returns a thread's position in the order of threads. Ready threads run in this order, from the first one
  // or from a random one.
  int place_of(int thread) const { return order == kDescending ? count_ - 1 - thread : thread; }

  std::vector<Thread> threads_;
  std::bitset<kMaxThreads> ready_;             // positions of the ready threads
  int waiting_[kMaxThreads / kWarp + 1] = {};  // number of waiting threads, for each warp and for the block
  int count_ = 0, current_ = 0;
  std::mt19937_64 random_;
  const std::function<void()>* call_ = nullptr;
  std::string failure_;
};

Machine& machine() {
  static auto* only = new Machine;  // never destroyed, because a program may end inside a kernel
  return *only;
}

std::string Machine::where() const {
  return title + ", block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(threadIdx.x);
}

void Machine::fail(const std::string& message) const {
  throw KernelError("block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(current_) + ": " +
                    message);
}

void Machine::run(const void* kernel, const dim3& grid, const dim3& block,
                  const std::function<void()>& call) {
  if (grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1) {
    throw KernelError(name_of(kernel) + ": blocks and threads have one dimension here");
  }
  if (grid.x == 0 || grid.x > kMaxBlocks || block.x == 0 || block.x > kMaxThreads) {
    throw KernelError(name_of(kernel) + " cannot be launched with " + std::to_string(grid.x) + " blocks of " +
                      std::to_string(block.x) + " threads");
  }
  call_ = &call;
  gridDim = grid;
  blockDim = block;
  count_ = static_cast<int>(block.x);
  random_.seed(order);
  for (const unsigned index : order_of_blocks(grid.x)) {
    blockIdx.x = index;
    run_block();
    if (failure_.empty()) continue;
    const std::string message = name_of(kernel) + ", " + failure_;
    failure_.clear();
    threads_.clear();  // drops the fibers of the stopped kernel
    throw KernelError(message);
  }
}

std::vector<unsigned> Machine::order_of_blocks(unsigned blocks) {
  std::vector<unsigned> all(blocks);
  std::iota(all.begin(), all.end(), 0u);
  if (order == kDescending) std::reverse(all.begin(), all.end());
  if (order > kDescending) std::shuffle(all.begin(), all.end(), random_);
  return all;
}

void Machine::run_block() {
  const Memory shared = shared_memory();
  std::memset(shared.data, 0xCD, shared.bytes);
  std::fill(std::begin(waiting_), std::end(waiting_), 0);
  while (threads_.size() < static_cast<size_t>(count_)) {
    const size_t index = threads_.size();
    threads_.emplace_back();
    threads_.back().fiber = std::make_unique<Fiber>([this, index] {
      try {
        (*call_)();
      } catch (const KernelError& error) {
        failure_ = error.what();
      }
      threads_[index].ended = true;
    });
  }
  for (int i = 0; i < count_; ++i) {
    threads_[i].ended = false;
    threads_[i].waiting = false;
    ready_.set(static_cast<size_t>(i));
  }
  while (failure_.empty() && ready_.any()) {
    current_ = next_thread();
    threadIdx.x = static_cast<unsigned>(current_);
    ready_.reset(static_cast<size_t>(place_of(current_)));
    threads_[current_].fiber->resume();
  }
  if (failure_.empty()) failure_ = deadlock();
  ready_.reset();
}

int Machine::next_thread() {
  size_t place = ready_.size();
  if (order > kDescending) place = ready_._Find_next(random_() % static_cast<unsigned>(count_));
  if (place == ready_.size()) place = ready_._Find_first();
  return place_of(static_cast<int>(place));
}

uint64_t Machine::wait(const Call& call) {
  Thread& self = threads_[current_];
  const Group group = group_of(call, current_);
  if (!names(call, current_)) fail("is not in the mask of its " + text_of(call));
  self.call = call;
  self.waiting = true;
  ++waiting_[group.index];
  if (all_wait(call, group)) release(call, group);
  self.fiber->stop();
  return self.result;
}

bool Machine::all_wait(const Call& call, const Group& group) const {
  const int named = call.mask == kWholeBlock ? count_ : __builtin_popcount(call.mask);
  if (waiting_[group.index] < named) return false;  // fast path for the usual case
  for (int i = group.first; i < group.last; ++i) {
    if (names(call, i) && (i >= count_ || !threads_[i].waiting || !same(threads_[i].call, call)))
      return false;
  }
  return true;
}

void Machine::release(const Call& call, const Group& group) {
  for (int i = group.first; i < group.last; ++i) {
    if (!names(call, i)) continue;
    Thread& thread = threads_[i];
    const int source = group.first + thread.call.source;
    if (!names(call, source)) {
      fail("in " + text_of(call) + ", thread " + std::to_string(i) + " reads thread " +
           std::to_string(source) + ", which is not in the mask");
    }
    thread.result = threads_[source].call.value;
    thread.waiting = false;
    ready_.set(static_cast<size_t>(place_of(i)));
    --waiting_[group.index];
  }
}

// Returns a description of the first deadlocked thread and a thread that it waits for; "" if all threads have
// ended.
std::string Machine::deadlock() const {
  for (int i = 0; i < count_; ++i) {
    if (!threads_[i].waiting) continue;
    const Call& call = threads_[i].call;
    const Group group = group_of(call, i);
    for (int other = group.first; other < group.last; ++other) {
      if (!names(call, other)) continue;
      std::string found;
      if (other >= count_) {
        found = "does not exist";
      } else if (threads_[other].ended) {
        found = "has ended";
      } else if (!same(threads_[other].call, call)) {
        found = "waits in " + text_of(threads_[other].call);
      } else {
        continue;
      }
      return "block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(i) + " waits in " +
             text_of(call) + " for thread " + std::to_string(other) + ", which " + found;
    }
  }
  return "";
}

}  // namespace

void set_order(uint64_t order) { machine().order = order; }

void set_title(const std::string& title) { machine().title = title; }

void run(const void* kernel, const dim3& grid, const dim3& block, const std::function<void()>& call) {
  machine().run(kernel, grid, block, call);
}

uint64_t exchange(const Call& call) {
  if (call.mask == kWholeBlock) machine().fail("an empty mask in " + text_of(call));
  return machine().wait(call);
}

void wait_for_block(Place place) { machine().wait({"__syncthreads", place, kWholeBlock, 0, 0}); }

int lane() { return machine().lane(); }

int segment_start(int width, Place place) {
  if (width < 1 || width > kWarp || (width & (width - 1)) != 0) {
    machine().fail("a shuffle of width " + std::to_string(width) + " at " + place.file + ":" +
                   std::to_string(place.line));
  }
  return machine().lane() & ~(width - 1);
}

}  // namespace cuda_host

// The sanitizers call these functions before they print a report.
extern "C" void __asan_on_error() { std::fprintf(stderr, "%s\n", cuda_host::machine().where().c_str()); }
extern "C" void __ubsan_on_report() { __asan_on_error(); }
