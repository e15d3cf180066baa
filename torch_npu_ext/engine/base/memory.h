// Host memory: buffers on huge or small pages that are committed on first use, and a check that new memory is
// available.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace rec_sdk {

constexpr size_t kHugePage = size_t{2} << 20;
size_t small_page();  // the system's page size: 4 KiB, on some Arm systems 16 or 64 KiB

// Random accesses miss the TLB less often on huge pages. But the first write to a huge page commits the whole
// page, so memory that may stay almost empty starts with small pages.
enum class Pages { kHuge, kSmall };

// Array size in bytes from which random reads are faster on huge pages. Measured on an AMD EPYC: compared
// with huge pages, reads on small pages take equally long in an array of 8 MiB, and 1.3 times as long in one
// of 15 MiB.
constexpr size_t kLargeArray = size_t{8} << 20;
constexpr Pages pages_of_array(size_t bytes) { return bytes > kLargeArray ? Pages::kHuge : Pages::kSmall; }

// Zeroed memory that the system commits page by page at the first access. Buffers of at least one huge page
// are aligned to huge pages. Small buffers are allocated from the heap: models with many tables have many of
// them, and a mapping costs two system calls and a fault per page.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  explicit HugeBuffer(size_t bytes, Pages pages = Pages::kHuge);  // throws std::bad_alloc
  HugeBuffer(HugeBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  HugeBuffer& operator=(HugeBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~HugeBuffer();

  void swap(HugeBuffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  // Requests huge pages. Memory that is committed later gets them at its first access; the system's
  // khugepaged merges small pages in the background, which would take this thread a millisecond each.
  // Addresses and contents do not change, and other threads may access them meanwhile.
  void use_huge_pages() noexcept;
  // Commits all pages of [begin, begin + bytes) now, if the system supports that. One call is cheaper than a
  // page fault for each small page.
  void populate(size_t begin, size_t bytes) noexcept;
  // Zeroes the small pages that lie entirely in [begin, begin + bytes). A mapped buffer returns them to the
  // system.
  void release(size_t begin, size_t bytes) noexcept;

  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  static constexpr size_t kMostOfHeap =
      4096;  // larger buffers are mapped, and their pages cost nothing before their first access
  bool mapped() const { return size_ > kMostOfHeap; }

  char* data_ = nullptr;
  size_t size_ = 0;
};

// An array of zeroed items in a HugeBuffer.
template <class T>
class HugeArray {
  static_assert(std::is_trivially_copyable_v<T>, "the memory is used as it comes, zeroed");

 public:
  HugeArray() = default;
  explicit HugeArray(size_t count, Pages pages = Pages::kHuge) : buffer_(count * sizeof(T), pages) {}

  // Makes space for at least `count` items. If the array grows, its contents are lost and all items are zero.
  void ensure(size_t count) {
    if (count > size()) buffer_ = HugeBuffer((count + count / 4) * sizeof(T));
  }
  size_t bytes() const { return buffer_.size(); }
  // Zeroes items [begin, begin + count) and returns their memory to the system, except on pages that also
  // contain other items.
  void release(size_t begin, size_t count) noexcept { buffer_.release(begin * sizeof(T), count * sizeof(T)); }
  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }
  T& operator[](size_t i) const { return data()[i]; }
  size_t size() const { return buffer_.size() / sizeof(T); }

 private:
  HugeBuffer buffer_;
};

// An array whose items never move while it grows. Its first 8 MiB are on small pages.
class ChunkedMemory {
 public:
  explicit ChunkedMemory(size_t item_bytes,
                         size_t chunk_bytes = kHugePage);  // a chunk has at most chunk_bytes bytes

  void extend(size_t count);  // makes the size at least `count`
  void* at(size_t i) const { return chunks_[i >> shift_].data() + (i & mask_) * item_bytes_; }
  size_t size() const { return chunks_.size() << shift_; }  // the number of items that fit into the chunks
  size_t item_bytes() const { return item_bytes_; }
  void clear() { chunks_.clear(); }

 private:
  size_t item_bytes_;
  int shift_;  // items per chunk = 1 << shift_
  size_t mask_;
  std::vector<HugeBuffer> chunks_;
};

// An allocator that leaves new items uninitialized, for vectors whose items are all overwritten after a
// resize.
template <class T>
struct Unset : std::allocator<T> {
  static_assert(std::is_trivial_v<T>, "its items need no constructor");
  template <class U>
  struct rebind {
    using other = Unset<U>;
  };
  template <class U>
  void construct(U* item) noexcept {
    ::new (static_cast<void*>(item)) U;
  }
  template <class U, class... Args>
  void construct(U* item, Args&&... args) {
    ::new (static_cast<void*>(item)) U(std::forward<Args>(args)...);
  }
};
using UnsetBytes = std::vector<char, Unset<char>>;

// Returns count * bytes, or the maximum of int64_t on overflow, so that memory checks reject it. Both must be
// >= 0.
inline int64_t saturated_product(int64_t count, int64_t bytes) {
  int64_t product;
  return __builtin_mul_overflow(count, bytes, &product) ? std::numeric_limits<int64_t>::max() : product;
}

// Returns the bytes that this process may still allocate: the machine's MemAvailable, or less if its cgroup
// limits it.
int64_t available_memory();

// A thread-safe check before host memory grows. Each reading of /proc grants up to 256 MiB more than
// requested, so that most checks need not read it again.
class MemoryGuard {
 public:
  // Throws MemoryLimitError if `bytes` more bytes do not fit into memory. The error names the table and the
  // part of it that grows, `what`.
  void require(int64_t bytes, const std::string& table, const char* what = "host store");
  void count_committed(int64_t bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    committed_ += bytes;
  }
  int64_t committed() const { return committed_; }
  // Returns a lock to hold until the first access to the pages of granted memory: before that, the memory
  // still looks free to other threads.
  std::unique_lock<std::mutex> one_at_a_time() { return std::unique_lock<std::mutex>(growth_); }
  // Limits the bytes that the stores of this engine may commit, in addition to the machine's free memory.
  void set_limit(int64_t bytes) { limit_ = bytes < 0 ? 0 : bytes; }

 private:
  std::mutex mutex_, growth_;
  int64_t committed_ = 0;
  int64_t granted_ = 0;
  int64_t limit_ = std::numeric_limits<int64_t>::max();
};

}  // namespace rec_sdk
