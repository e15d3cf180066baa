// The file of a host store on disk. It is mapped into memory, so that the kernel's page cache holds its
// pages.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace rec_sdk {

// A part of a file that is mapped into memory.
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

// A new file, which the destructor removes, because its rows are useless without the id map. It consists of a
// page with a marker, followed by the rows. Disk blocks are allocated before rows are written, so that a full
// disk makes allocate() throw instead of causing a SIGBUS.
class StoreFile {
 public:
  StoreFile(std::string path, std::string table);  // throws DiskError, also if the file exists
  StoreFile(const StoreFile&) = delete;
  StoreFile& operator=(const StoreFile&) = delete;
  ~StoreFile();

  // Allocates disk space for the first `bytes` bytes of rows. Throws DiskError.
  void allocate(int64_t bytes);
  void shrink() noexcept;  // removes all rows; precondition: nothing is mapped
  int64_t bytes() const { return allocated_; }

  // Maps bytes [begin, begin + bytes) of the rows into memory, whether they are allocated or not. `begin`
  // must be a multiple of the page size.
  FileMapping map(int64_t begin, int64_t bytes) const;  // throws std::bad_alloc

  static bool in_memory(
      const char* address) noexcept;  // whether the page cache holds the page of this mapped address
  static void will_need(const char* begin, const char* end) noexcept;  // starts reading these pages

 private:
  [[noreturn]] void fail(int error, const std::string& what) const;

  std::string path_, table_;
  int file_ = -1;
  pid_t owner_;
  int64_t allocated_ = 0;
};

}  // namespace rec_sdk
