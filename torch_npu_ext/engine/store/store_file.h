// The file of a host store on disk: mapped into memory, with the kernel's page cache in between.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace rec_sdk {

// A part of a file in memory.
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

// A file that is new, and removed with this object: without the id map its rows are of no use. Behind one
// page that says what it is come the rows. Their blocks are taken from the disk before anything is written to
// them, so that a full disk is an error of allocate() and no signal.
class StoreFile {
 public:
  StoreFile(std::string path, std::string table);  // throws DiskError, also where a file is there already
  StoreFile(const StoreFile&) = delete;
  StoreFile& operator=(const StoreFile&) = delete;
  ~StoreFile();

  void allocate(
      int64_t bytes);      // the first `bytes` of the rows are on the disk from now on. Throws DiskError
  void shrink() noexcept;  // to no rows. Precondition: nothing is mapped
  int64_t bytes() const { return allocated_; }

  // [begin, begin + bytes) of the rows, whether allocated or not; begin is a multiple of the page.
  FileMapping map(int64_t begin, int64_t bytes) const;  // throws std::bad_alloc

  static bool in_memory(const char* address) noexcept;  // the page at a mapped address is in the page cache
  static void will_need(const char* begin, const char* end) noexcept;  // starts to read these pages

 private:
  [[noreturn]] void fail(int error, const std::string& what) const;

  std::string path_, table_;
  int file_ = -1;
  pid_t owner_;
  int64_t allocated_ = 0;
};

}  // namespace rec_sdk
