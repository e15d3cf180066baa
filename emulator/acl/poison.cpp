#include "poison.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "settings.h"

namespace rec_sdk::emulator {
namespace {

// A memory file filled with poison. It is mapped privately, many times in a row, to fill a large range. A
// longer file takes more memory, and a shorter file needs more mappings, of which a process can have about
// 65,000.
struct PoisonFile {
  int file = -1;
  uint64_t bytes = 0;

  PoisonFile() {
    constexpr uint64_t kMappings = 16384, kLeast = 8 << 20, kStep = 1 << 20;
    const uint64_t all = settings().memory * static_cast<uint64_t>(settings().devices);
    bytes = std::max(kLeast, (all / kMappings + kStep - 1) / kStep * kStep);
    file = memfd_create("rec_sdk_npu_poison", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
      return;
    }
    void* contents = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (contents == MAP_FAILED) {
      close(file);
      file = -1;
      return;
    }
    std::memset(contents, kPoison, bytes);
    munmap(contents, bytes);
  }
};

}  // namespace

bool map_poisoned(char* begin, uint64_t bytes) {
  static const PoisonFile poison;
  for (uint64_t done = 0; done < bytes; done += poison.bytes) {
    const uint64_t part = std::min(poison.bytes, bytes - done);
    if (poison.file < 0 || mmap(begin + done, part, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, poison.file, 0) == MAP_FAILED) {
      return false;
    }
  }
  return true;
}

void poison_again(char* begin, uint64_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t first = (start + page - 1) / page * page;
  const uintptr_t last = (start + bytes) / page * page;
  if (first >= last) {
    std::memset(begin, kPoison, bytes);
    return;
  }
  // A private page of a file has the contents of the file again after it is dropped.
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  std::memset(begin, kPoison, first - start);
  std::memset(reinterpret_cast<void*>(last), kPoison, start + bytes - last);
}

}  // namespace rec_sdk::emulator
