// Host memory: lazily committed buffers on huge or small pages, and the check that growth fits the machine.
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
size_t small_page();  // of the system: 4 KiB, in some Arm systems 16 or 64

// With huge pages random rows and buckets miss the TLB less. The first byte of one commits all of it, so
// memory that may stay almost empty begins with small pages.
enum class Pages { kHuge, kSmall };

// The pages of an array any of whose items may be used. Random reads of 8 MiB take as long with small pages
// as with huge ones; those of 15 MiB, 1.3 times as long (an AMD EPYC).
constexpr size_t kLargeArray = size_t{8} << 20;
constexpr Pages pages_of_array(size_t bytes) { return bytes > kLargeArray ? Pages::kHuge : Pages::kSmall; }

// Zeroed memory that the system commits page by page at the first touch. From one huge page on it is aligned
// to huge pages. A small one, of which a model of many tables has many, is taken from the heap instead: a
// mapping of its own costs two calls of the system and a fault for each page.
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
  // Small pages become huge ones, as far as the system has any: those in use now, and others when they are
  // first touched. The contents stay where they are; other threads may read and write them meanwhile.
  void use_huge_pages() noexcept {
    expect_huge_pages();
    merge_pages(0, size_);
  }
  // The two parts of it: small pages that come from now on are huge ones, and those of whole huge pages in
  // [begin, begin + bytes) that are in use become huge, which takes a millisecond or two for each.
  void expect_huge_pages() noexcept;
  void merge_pages(size_t begin, size_t bytes) noexcept;
  // The system gives all pages of [begin, begin + bytes) now, where it can: one call takes less than a fault
  // for each small page.
  void populate(size_t begin, size_t bytes) noexcept;
  // Whole small pages of [begin, begin + bytes) are zero again, and the system has the memory of those that
  // were mapped.
  void give_back(size_t begin, size_t bytes) noexcept;

  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  static constexpr size_t kMostOfHeap = 4096;  // pages of larger ones cost nothing until they are touched
  bool mapped() const { return size_ > kMostOfHeap; }

  char* data_ = nullptr;
  size_t size_ = 0;
};

template <class T>
class HugeArray {
  static_assert(std::is_trivially_copyable_v<T>, "the memory is used as it comes, zeroed");

 public:
  HugeArray() = default;
  explicit HugeArray(size_t count, Pages pages = Pages::kHuge) : buffer_(count * sizeof(T), pages) {}

  // Room for `count` items. Growing drops the contents: the new memory is zero.
  void ensure(size_t count) {
    if (count > size()) buffer_ = HugeBuffer((count + count / 4) * sizeof(T));
  }
  size_t bytes() const { return buffer_.size(); }
  void expect_huge_pages() noexcept { buffer_.expect_huge_pages(); }
  void merge_pages(size_t begin, size_t bytes) noexcept { buffer_.merge_pages(begin, bytes); }
  // Items [begin, begin + count) are zero again, but for those beside them on a page.
  void give_back(size_t begin, size_t count) noexcept {
    buffer_.give_back(begin * sizeof(T), count * sizeof(T));
  }
  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }
  T& operator[](size_t i) const { return data()[i]; }
  size_t size() const { return buffer_.size() / sizeof(T); }

 private:
  HugeBuffer buffer_;
};

// Items of equal size that never move while their number grows.
class ChunkedMemory {
 public:
  explicit ChunkedMemory(size_t item_bytes, size_t chunk_bytes = kHugePage);  // at most so many each

  void extend(size_t count);  // room for at least `count` items
  void* at(size_t i) const { return chunks_[i >> shift_].data() + (i & mask_) * item_bytes_; }
  size_t size() const { return chunks_.size() << shift_; }  // items there is room for
  size_t item_bytes() const { return item_bytes_; }
  void clear() {
    chunks_.clear();
    pages_ = Pages::kSmall;
  }

 private:
  size_t item_bytes_;
  int shift_;  // items per chunk = 1 << shift_
  size_t mask_;
  Pages pages_ = Pages::kSmall;  // of the chunks
  std::vector<HugeBuffer> chunks_;
};

// Items of a vector that grows are not zeroed: they are written next.
template <class T>
struct Unset : std::allocator<T> {
  static_assert(std::is_trivial_v<T>, "its items need no constructor");
  template <class U>
  struct rebind {
    using other = Unset<U>;
  };
  template <class U>
  void construct(U* place) noexcept {
    ::new (static_cast<void*>(place)) U;
  }
  template <class U, class... Given>
  void construct(U* place, Given&&... given) {
    ::new (static_cast<void*>(place)) U(std::forward<Given>(given)...);
  }
};
using UnsetBytes = std::vector<char, Unset<char>>;

// count * bytes, or the largest number: to be refused, not to overflow. Neither may be negative.
inline int64_t saturated_product(int64_t count, int64_t bytes) {
  int64_t product;
  return __builtin_mul_overflow(count, bytes, &product) ? std::numeric_limits<int64_t>::max() : product;
}

// Bytes this process may still take: the machine's MemAvailable, or what its cgroup leaves when that is less.
int64_t available_memory();

// Guards the growth of host memory, for several threads. A grant is remembered, so /proc is read once per
// some 256 MiB of growth.
class MemoryGuard {
 public:
  // Throws MemoryLimitError naming the table, and what of it, when `bytes` more cannot be held.
  void require(int64_t bytes, const std::string& table, const char* what = "host store");
  void count_committed(int64_t bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    committed_ += bytes;
  }
  int64_t committed() const { return committed_; }
  // Held while memory that was granted is first used: until then it looks free to others.
  std::unique_lock<std::mutex> one_at_a_time() { return std::unique_lock<std::mutex>(growth_); }
  // Caps what the stores of this engine may commit, below what the machine has.
  void set_limit(int64_t bytes) { limit_ = bytes < 0 ? 0 : bytes; }

 private:
  std::mutex mutex_, growth_;
  int64_t committed_ = 0;
  int64_t granted_ = 0;
  int64_t limit_ = std::numeric_limits<int64_t>::max();
};

}  // namespace rec_sdk
