// Errors of the engine. In Python, std::invalid_argument becomes ValueError, std::out_of_range IndexError,
// std::bad_alloc MemoryError and DiskError OSError; CacheTooSmallError and CapacityError have Python classes.
#pragma once

#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace rec_sdk {

struct CacheTooSmallError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct CapacityError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Thrown if a file cannot be created or the disk is full.
class DiskError : public std::runtime_error {
 public:
  DiskError(int error, std::string path, const std::string& message)
      : std::runtime_error(message), error_(error), path_(std::move(path)) {}
  int error() const { return error_; }  // an errno
  const std::string& path() const { return path_; }

 private:
  int error_;
  std::string path_;
};

class MemoryLimitError : public std::bad_alloc {
 public:
  explicit MemoryLimitError(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

}  // namespace rec_sdk
