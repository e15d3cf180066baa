#include "torch_npu_ext/engine/store/store_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "torch_npu_ext/engine/base/errors.h"

namespace rec_sdk {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHeader = kPage;
constexpr int64_t kLeastStep = int64_t{1} << 20, kMostStep = int64_t{1} << 30;
// How many bytes one call of madvise() requests. The kernel reads at most the device's read-ahead per call,
// by default 128 KiB (force_page_cache_readahead()).
constexpr int64_t kAdvice = int64_t{128} << 10;
// rec_sdk_torch/tbe/cache/store_folder.py checks this marker before it removes a file.
constexpr char kMarker[] = "rec_sdk_torch host store: rows of a running process, no save\n";

int64_t rounded_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

FileMapping::~FileMapping() {
  if (data_ != nullptr) munmap(data_, size_);
}

StoreFile::StoreFile(std::string path, std::string table)
    : path_(std::move(path)), table_(std::move(table)), owner_(getpid()) {
  file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file_ < 0) fail(errno, "cannot be created");
  if (pwrite(file_, kMarker, sizeof kMarker - 1, 0) == static_cast<ssize_t>(sizeof kMarker - 1)) return;
  const int error = errno;
  unlink(path_.c_str());
  close(file_);
  fail(error, "cannot be written");
}

// Removes the file, unless this process is a forked child or the path now names another file.
StoreFile::~StoreFile() {
  struct stat own, named;
  const bool ours = getpid() == owner_ && fstat(file_, &own) == 0 && stat(path_.c_str(), &named) == 0;
  if (ours && own.st_dev == named.st_dev && own.st_ino == named.st_ino) unlink(path_.c_str());
  close(file_);
}

void StoreFile::fail(int error, const std::string& what) const {
  throw DiskError(error, path_, "table '" + table_ + "': its host store " + what);
}

// The file grows in steps of at least an eighth of its size. If the disk has too little space for such a
// step, it grows only as far as needed.
void StoreFile::allocate(int64_t bytes) {
  if (bytes <= allocated_) return;
  const int64_t step = rounded_up(std::clamp(allocated_ / 8, kLeastStep, kMostStep), kPage);
  const int64_t exact = rounded_up(bytes, kPage) - allocated_;
  for (const int64_t more : {std::max(exact, step), exact}) {
    int error;
    do {
      error = posix_fallocate(file_, kHeader + allocated_, more);
    } while (error == EINTR);
    if (error == 0) {
      allocated_ += more;
      return;
    }
    // A partial allocation is undone, because the next attempt, or another file, may need the space.
    if (ftruncate(file_, kHeader + allocated_) != 0) fail(errno, "cannot be truncated");
    if (error != ENOSPC && error != EDQUOT && error != EFBIG) fail(error, "cannot grow");
    if (more == exact) {
      struct statvfs disk;
      const bool known = fstatvfs(file_, &disk) == 0;
      const std::string free =
          known ? std::to_string(static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize) + " are free" : "";
      fail(error, "needs " + std::to_string(exact) + " more bytes of disk and " + free +
                      "; free some, or use a larger disk");
    }
  }
}

void StoreFile::shrink() noexcept {
  if (ftruncate(file_, kHeader) == 0) allocated_ = 0;
}

FileMapping StoreFile::map(int64_t begin, int64_t bytes) const {
  void* const mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_NORESERVE, file_, kHeader + begin);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  FileMapping mapping(static_cast<char*>(mapped), static_cast<size_t>(bytes));
  // Without this advice, each page fault would also read up to 128 KiB of other rows.
  madvise(mapped, static_cast<size_t>(bytes), MADV_RANDOM);
  return mapping;
}

bool StoreFile::in_memory(const char* address) noexcept {
  unsigned char present = 1;
  const uintptr_t page = reinterpret_cast<uintptr_t>(address) / kPage * kPage;
  mincore(reinterpret_cast<void*>(page), kPage, &present);
  return (present & 1) != 0;
}

void StoreFile::will_need(const char* begin, const char* end) noexcept {
  uintptr_t page = reinterpret_cast<uintptr_t>(begin) / kPage * kPage;
  const uintptr_t last = reinterpret_cast<uintptr_t>(end);
  for (; page < last; page += kAdvice) {
    const size_t bytes = std::min<size_t>(kAdvice, rounded_up(static_cast<int64_t>(last - page), kPage));
    madvise(reinterpret_cast<void*>(page), bytes, MADV_WILLNEED);
  }
}

}  // namespace rec_sdk
