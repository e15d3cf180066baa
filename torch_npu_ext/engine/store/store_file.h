// The file of a host store on disk, mapped into memory through the kernel's page cache.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace rec_sdk {

// A mapped part of a file.
class FileMapping {
 public:
  FileMapping() = default;
  FileMapping(char* data, size_t size) : data_(data), size_(size) {}
  FileMapping(FileMapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  FileMapping& operator=(FileMapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~FileMapping();

  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

// A new file, which is removed with this object, because its rows are useless without the id map. A page with
// a marker is followed by the rows. Disk blocks are allocated before rows are written, so that a full disk is
// an error of allocate() and not a SIGBUS.
class StoreFile {
 public:
  StoreFile(std::string path, std::string table);  // throws DiskError, also if the file exists
  StoreFile(const StoreFile&) = delete;
  StoreFile& operator=(const StoreFile&) = delete;
  ~StoreFile();

  // Allocates the first `bytes` of the rows on disk. Throws DiskError.
  void allocate(int64_t bytes);
  void shrink() noexcept;  // removes all rows; precondition: nothing is mapped
  int64_t bytes() const { return allocated_; }

  // Maps [begin, begin + bytes) of the rows, allocated or not; begin is a multiple of the page size.
  FileMapping map(int64_t begin, int64_t bytes) const;  // throws std::bad_alloc

  static bool in_memory(
      const char* address) noexcept;  // whether the page of a mapped address is in the page cache
  static void will_need(const char* begin, const char* end) noexcept;  // starts reading these pages

 private:
  [[noreturn]] void fail(int error, const std::string& what) const;

  std::string path_, table_;
  int file_ = -1;
  pid_t owner_;
  int64_t allocated_ = 0;
};

}  // namespace rec_sdk
