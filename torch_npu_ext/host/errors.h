// What the engine throws. std::invalid_argument becomes ValueError, std::out_of_range IndexError and
// std::bad_alloc MemoryError in Python; the other two have Python classes of their own.
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

class MemoryLimitError : public std::bad_alloc {
 public:
  explicit MemoryLimitError(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

}  // namespace rec_sdk
