#include "live_memory.h"

#include <map>
#include <mutex>
#include <shared_mutex>

#include "addresses.h"
#include "emulator.h"
#include "errors.h"

namespace rec_sdk::emulator {
namespace {

using Pieces = std::map<uintptr_t, LiveMemory>;

// This object is never destroyed, because streams still run while the process ends.
std::shared_mutex& live_mutex = *new std::shared_mutex;
Pieces& live = *new Pieces;

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// Returns the last piece of memory that begins at or before the address.
Pieces::const_iterator piece_before(uintptr_t address) {
  auto piece = live.upper_bound(address);
  return piece == live.begin() ? live.end() : std::prev(piece);
}

// Returns the end of the memory that begins with this piece, which may consist of several adjacent mapped
// pieces.
uintptr_t end_of(Pieces::const_iterator piece) {
  uintptr_t end = piece->first + piece->second.bytes;
  if (!piece->second.mapped) {
    return end;
  }
  const AddressRange range = range_of(reinterpret_cast<void*>(piece->first));
  while (++piece != live.end() && piece->second.mapped && piece->first == end &&
         end - range.begin < range.bytes) {
    end += piece->second.bytes;
  }
  return end;
}

}  // namespace

void add_live_memory(const void* begin, const LiveMemory& memory) {
  const std::unique_lock<std::shared_mutex> lock(live_mutex);
  live[number(begin)] = memory;
}

LiveMemory remove_live_memory(const void* begin, bool mapped) {
  const std::unique_lock<std::shared_mutex> lock(live_mutex);
  const auto piece = live.find(number(begin));
  if (piece == live.end() || piece->second.mapped != mapped) {
    return {};
  }
  const LiveMemory memory = piece->second;
  live.erase(piece);
  return memory;
}

LiveMemory live_memory_at(const void* begin) {
  const std::shared_lock<std::shared_mutex> lock(live_mutex);
  const auto piece = live.find(number(begin));
  return piece == live.end() ? LiveMemory{} : piece->second;
}

char* accessible(const void* address, uint64_t bytes, int* device) {
  const std::shared_lock<std::shared_mutex> lock(live_mutex);
  const uintptr_t begin = number(address);
  const auto piece = piece_before(begin);
  if (piece == live.end()) {
    return nullptr;
  }
  // Most accesses are inside one piece. For the others, the adjacent mapped pieces are included.
  uintptr_t end = piece->first + piece->second.bytes;
  if (begin <= end && bytes > end - begin) {
    end = end_of(piece);
  }
  if (begin > end || bytes > end - begin) {
    return nullptr;
  }
  if (device != nullptr) {
    *device = piece->second.device;
  }
  // The range of the piece is used, because the address itself may be just behind the end of its range.
  return reinterpret_cast<char*>(begin + range_of(reinterpret_cast<void*>(piece->first)).bytes);
}

std::string describe(const void* address) {
  const AddressRange range = range_of(address);
  if (range.device < 0) {
    return "host memory";
  }
  const std::shared_lock<std::shared_mutex> lock(live_mutex);
  const auto piece = piece_before(number(address));
  if (piece == live.end() || number(address) >= end_of(piece)) {
    return text("no live allocation of device %d", range.device);
  }
  return text(
      "an allocation of device %d that begins %llu bytes before and ends %llu bytes behind this address",
      range.device, static_cast<unsigned long long>(number(address) - piece->first),
      static_cast<unsigned long long>(end_of(piece) - number(address)));
}

}  // namespace rec_sdk::emulator

__attribute__((visibility("default"))) void* rec_sdk_emulator_host_address(const void* device_address,
                                                                           uint64_t bytes) {
  return rec_sdk::emulator::accessible(device_address, bytes);
}
