#include "torch_npu_ext/engine/base/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "torch_npu_ext/engine/base/errors.h"

namespace rec_sdk {
namespace {

constexpr size_t kCacheLine = 64;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
// The bytes of further growth that a check of /proc grants in advance.
constexpr int64_t kGrantAhead = int64_t{256} << 20;

// Returns the value of `key` in a file of "key value" lines; `missing` if there is no such file or key.
int64_t read_field(const std::string& path, const std::string& key, int64_t missing) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    int64_t value = 0;
    if (words >> word >> value && word == key) return value;
  }
  return missing;
}

int64_t read_number(const std::string& path, int64_t missing) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value ? value : missing;  // `missing` also for "max", which is not a number
}

// Returns the free memory of a cgroup. The page cache, including pages of stores on disk, counts as free: the
// kernel counts it as used but can drop it.
int64_t cgroup_free(const std::string& directory, const char* limit_name, const char* usage_name) {
  const int64_t limit = read_number(directory + limit_name, kUnlimited);
  const int64_t used = read_number(directory + usage_name, 0);
  if (limit >= kUnlimited / 2) return kUnlimited;
  const std::string stat = directory + "/memory.stat";
  const int64_t cache = read_field(stat, "inactive_file", 0) + read_field(stat, "active_file", 0);
  return std::max<int64_t>(0, limit - used + cache);
}

// Returns the minimum of the free memory of a cgroup and its ancestors. In a container, the path of the
// cgroup may not exist, but its root does.
int64_t cgroup_free(const std::string& root, std::string path, const char* limit, const char* usage) {
  int64_t free = kUnlimited;
  while (true) {
    if (path == "/") path.clear();
    free = std::min(free, cgroup_free(root + path, limit, usage));
    if (path.empty()) return free;
    path.resize(path.rfind('/'));
  }
}

int64_t cgroup_memory() {
  int64_t free = kUnlimited;
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {  // "number:controllers:/path"; cgroup v2: "0::/path"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos || line[second + 1] != '/') continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      free = std::min(free, cgroup_free("/sys/fs/cgroup", path, "/memory.max", "/memory.current"));
    } else if (controllers.find(",memory,") != std::string::npos) {
      const char* const limit = "/memory.limit_in_bytes";
      free = std::min(free, cgroup_free("/sys/fs/cgroup/memory", path, limit, "/memory.usage_in_bytes"));
    }
  }
  return free;
}

}  // namespace

size_t small_page() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

HugeBuffer::HugeBuffer(size_t bytes, Pages pages) {
  if (bytes == 0) return;
  const bool large = bytes >= kHugePage;
  const size_t unit = large ? kHugePage : small_page();
  if (bytes > std::numeric_limits<size_t>::max() / 2) throw std::bad_alloc();
  size_ = (bytes + unit - 1) / unit * unit;
  if (!mapped()) {
    data_ = static_cast<char*>(std::aligned_alloc(kCacheLine, size_));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, size_);
    return;
  }
  const size_t slack = large ? kHugePage : 0;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(nullptr, size_ + slack, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  char* start = static_cast<char*>(mapped);
  const size_t misaligned = reinterpret_cast<uintptr_t>(start) % unit;
  const size_t skip = misaligned == 0 ? 0 : unit - misaligned;
  if (skip > 0) munmap(start, skip);
  if (slack > skip) munmap(start + skip + size_, slack - skip);
  data_ = start + skip;
#ifdef MADV_HUGEPAGE
  // If transparent huge pages are set to "always", only MADV_NOHUGEPAGE keeps this memory on small pages.
  if (large) madvise(data_, size_, pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
}

HugeBuffer::~HugeBuffer() {
  if (data_ == nullptr) return;
  if (mapped()) {
    munmap(data_, size_);
  } else {
    std::free(data_);
  }
}

void HugeBuffer::use_huge_pages() noexcept {
#ifdef MADV_HUGEPAGE
  if (size_ >= kHugePage) madvise(data_, size_, MADV_HUGEPAGE);
#endif
}

void HugeBuffer::populate(size_t begin, size_t bytes) noexcept {
  constexpr size_t kLeast = size_t{1} << 16;  // with fewer bytes, the call costs as much as the page faults
  constexpr int kPopulate =
      23;  // MADV_POPULATE_WRITE of Linux 5.14; on older systems the pages are committed at their first touch
  const size_t unit = small_page(), first = begin / unit * unit, end = std::min(begin + bytes, size_);
  if (mapped() && bytes >= kLeast && first < end) madvise(data_ + first, end - first, kPopulate);
}

void HugeBuffer::release(size_t begin, size_t bytes) noexcept {
  const size_t unit = small_page();
  const size_t first = (begin + unit - 1) / unit * unit;
  const size_t end = std::min(begin + bytes, size_) / unit * unit;
  if (first >= end) return;
  if (mapped()) {
    madvise(data_ + first, end - first, MADV_DONTNEED);
  } else {
    std::memset(data_ + first, 0, end - first);
  }
}

ChunkedMemory::ChunkedMemory(size_t item_bytes, size_t chunk_bytes) : item_bytes_(item_bytes), shift_(0) {
  while ((item_bytes << (shift_ + 1)) <= chunk_bytes) ++shift_;
  mask_ = (size_t{1} << shift_) - 1;
}

void ChunkedMemory::extend(size_t count) {
  const size_t needed = (count + mask_) >> shift_, bytes = (mask_ + 1) * item_bytes_;
  while (chunks_.size() < needed) chunks_.emplace_back(bytes, pages_of_array((chunks_.size() + 1) * bytes));
}

int64_t available_memory() {
  const int64_t kib = read_field("/proc/meminfo", "MemAvailable:", kUnlimited / 1024);
  return std::min(kib * 1024, cgroup_memory());
}

void MemoryGuard::require(int64_t bytes, const std::string& table, const char* what) {
  if (bytes <= 0) return;
  const std::lock_guard<std::mutex> guard(mutex_);
  int64_t room = limit_ - committed_;
  if (bytes <= room && bytes > granted_) {
    const int64_t available = available_memory();
    room = std::min(room, available);
    granted_ = bytes < available ? bytes + std::min(kGrantAhead, available - bytes) : available;
  }
  if (bytes > room) {
    throw MemoryLimitError("table '" + table + "': its " + what + " needs " + std::to_string(bytes) +
                           " more bytes and " + std::to_string(std::max<int64_t>(0, room)) +
                           " are free; use a machine or a memory limit with more, or shard the table");
  }
  granted_ -= bytes;
}

}  // namespace rec_sdk
