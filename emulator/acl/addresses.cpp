#include "addresses.h"

#include <sys/mman.h>

#include <atomic>
#include <mutex>

namespace rec_sdk::emulator {
namespace {

struct Slot {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uint64_t> bytes{0};  // 0 if the slot is free
  std::atomic<int> device{-1};
};

constexpr int kSlots = 1024;
Slot slots[kSlots];  // usable at any time: initialized at compile time, never destroyed
std::atomic<int> used_slots{0};
std::mutex& slots_mutex = *new std::mutex;

Slot* free_slot() {
  for (Slot& slot : slots) {
    if (slot.bytes == 0) {
      return &slot;
    }
  }
  return nullptr;
}

}  // namespace

char* reserve_addresses(uint64_t wanted, int device) {
  constexpr uint64_t kStep = 2 << 20;  // a multiple of every page size
  const uint64_t bytes = (wanted + kStep - 1) / kStep * kStep;
  const std::lock_guard<std::mutex> lock(slots_mutex);
  Slot* slot = free_slot();
  if (slot == nullptr || wanted == 0 || wanted > (uint64_t{1} << 46)) {
    return nullptr;
  }
  void* begin = mmap(nullptr, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    return nullptr;
  }
  slot->begin = reinterpret_cast<uintptr_t>(begin);
  slot->device = device;
  slot->bytes = bytes;
  const int index = static_cast<int>(slot - slots);
  if (index >= used_slots) {
    used_slots = index + 1;
  }
  return static_cast<char*>(begin);
}

void release_addresses(char* begin) {
  const std::lock_guard<std::mutex> lock(slots_mutex);
  for (Slot& slot : slots) {
    if (slot.bytes != 0 && slot.begin == reinterpret_cast<uintptr_t>(begin)) {
      munmap(begin, 2 * slot.bytes);
      slot.bytes = 0;
      return;
    }
  }
}

AddressRange range_of(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  const int used = used_slots;
  for (int i = 0; i < used; ++i) {
    const uint64_t bytes = slots[i].bytes;
    const uintptr_t begin = slots[i].begin;
    if (wanted >= begin && wanted - begin < bytes) {
      return {begin, bytes, slots[i].device};
    }
  }
  return {};
}

}  // namespace rec_sdk::emulator
