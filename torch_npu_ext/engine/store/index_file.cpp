#include "torch_npu_ext/engine/store/index_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "torch_npu_ext/engine/base/errors.h"

namespace rec_sdk {
namespace {

constexpr char kMagic[] = "rec_sdk index 2\n", kMagic1[] = "rec_sdk index 1\n";
constexpr int64_t kBlock = 64;  // entries that are prefetched at once

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw DiskError(errno, path, what);
}

// At most five of eight entries are used: 25.6 bytes per id.
uint64_t capacity_for(int64_t ids) {
  const auto count = static_cast<uint64_t>(ids);
  return std::max<uint64_t>(64, count + (count * 3 + 4) / 5);
}

// Returns the version of the format; 0 if the file is not an index.
int version_of(const IndexHeader& header, size_t bytes) {
  const bool power_of_two = (header.capacity & (header.capacity - 1)) == 0;
  if (header.entries >= header.capacity ||
      (bytes - sizeof(IndexHeader)) / sizeof(IndexEntry) != header.capacity) {
    return 0;
  }
  if (std::memcmp(header.magic, kMagic, sizeof header.magic) == 0) return 2;
  return std::memcmp(header.magic, kMagic1, sizeof header.magic) == 0 && power_of_two ? 1 : 0;
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(path, "cannot be opened");
  struct stat about;
  const bool known = fstat(file, &about) == 0;
  size_ = known ? static_cast<size_t>(about.st_size) : 0;
  void* mapped = nullptr;
  if (size_ > 0) mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (!known || mapped == MAP_FAILED) fail(path, "cannot be mapped into memory");
  data_ = static_cast<char*>(mapped);
  // The entries that a batch reads are not neighbours, so readahead would only evict other pages.
  if (size_ > 0) madvise(data_, size_, MADV_RANDOM);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

IndexFile::IndexFile(const std::string& path, const std::string& save) : file_(path) {
  version_ = file_.size() < sizeof(IndexHeader) ? 0 : version_of(header(), file_.size());
  if (version_ == 0) {
    throw std::invalid_argument(path + ": not an index, or damaged; remove it, and it is built again");
  }
  if (save.size() != sizeof header().save || std::memcmp(header().save, save.data(), save.size()) != 0) {
    throw std::invalid_argument(path + ": an index of another save; remove it, and it is built again");
  }
  entries_ = reinterpret_cast<const IndexEntry*>(file_.data() + sizeof(IndexHeader));
  capacity_ = header().capacity;
}

bool IndexFile::same(const IndexFile& other) const {
  if (header().entries != other.header().entries) return false;
  uint64_t entries = 0;
  for (uint64_t at = 0; at < other.capacity_; ++at) {
    const IndexEntry& entry = other.entries_[at];
    entries += entry.file != 0;
    if (entry.file == 0 && (entry.id != 0 || entry.row != 0)) return false;
  }
  if (entries != other.header().entries) return false;
  for (uint64_t at = 0; at < capacity_; ++at) {
    const IndexEntry& entry = entries_[at];
    if (entry.file == 0) continue;
    const IndexEntry* const found = other.find(entry.id, index_hash(entry.id));
    if (found == nullptr || found->file != entry.file || found->row != entry.row) return false;
  }
  return true;
}

IndexWriter::IndexWriter(const std::string& path, int64_t most_ids, const std::string& save, uint64_t window)
    : path_(path),
      most_ids_(most_ids),
      capacity_(capacity_for(most_ids)),
      window_(std::min(window, capacity_)),
      size_(window_),
      entries_(window_) {
  if (window_ == 0) throw std::invalid_argument("window is 0, it must be at least 1");
  file_ = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file_ < 0) fail(path, "cannot be created");
  const off_t bytes = static_cast<off_t>(sizeof(IndexHeader) + capacity_ * sizeof(IndexEntry));
  const int error = posix_fallocate(file_, 0, bytes);
  if (error != 0) {
    close(file_);
    errno = error;
    fail(path, "an index of " + std::to_string(bytes) + " bytes does not fit on the disk");
  }
  std::memcpy(header_.magic, kMagic, sizeof header_.magic);
  header_.capacity = capacity_;
  std::memcpy(header_.save, save.data(), std::min(save.size(), sizeof header_.save));
}

IndexWriter::~IndexWriter() { close(file_); }

// Stores an entry at position `at` of the window, or at the first free position behind it; beyond the window,
// the entry is kept in overflow_. Returns whether the id is new.
bool IndexWriter::put(uint64_t at, const IndexEntry& entry) {
  while (at < size_ && entries_[at].file != 0 && entries_[at].id != entry.id) ++at;
  if (at < size_) {
    const bool added = entries_[at].file == 0;
    entries_[at] = entry;
    return added;
  }
  const auto found = std::find_if(overflow_.begin(), overflow_.end(),
                                  [&entry](const IndexEntry& other) { return other.id == entry.id; });
  if (found == overflow_.end()) {
    overflow_.push_back(entry);
    return true;
  }
  *found = entry;
  return false;
}

template <class Entry>
void IndexWriter::put_all(const int64_t* ids, int64_t count, const Entry& entry) {
  uint64_t places[kBlock];
  IndexEntry own[kBlock];
  const uint64_t first = round_ * window_;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    int64_t found = 0;
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t place = index_position(index_hash(ids[i]), capacity_) - first;
      if (place >= size_) continue;
      __builtin_prefetch(&entries_[place], 1);
      places[found] = place;
      own[found++] = entry(i);
    }
    for (int64_t i = 0; i < found; ++i) {
      if (!put(places[i], own[i])) continue;
      if (static_cast<int64_t>(++header_.entries) > most_ids_) {
        throw std::length_error("an index for " + std::to_string(most_ids_) + " ids is full");
      }
    }
  }
}

void IndexWriter::add(const int64_t* ids, int64_t count, uint32_t file, uint32_t first_row) {
  put_all(ids, count,
          [=](int64_t i) { return IndexEntry{ids[i], file + 1, first_row + static_cast<uint32_t>(i)}; });
}

void IndexWriter::remove(const int64_t* ids, int64_t count) {
  put_all(ids, count, [=](int64_t i) { return IndexEntry{ids[i], kRemoved, 0}; });
}

void IndexWriter::put_carried() {
  for (const IndexEntry& entry : std::exchange(overflow_, {})) put(0, entry);
}

void IndexWriter::end_round() {
  write_window(round_++);
  if (round_ == rounds()) return;
  size_ = std::min(window_, capacity_ - round_ * window_);
  std::memset(entries_.data(), 0, window_ * sizeof(IndexEntry));
  put_carried();
}

void IndexWriter::finish(bool sync) {
  if (round_ != rounds()) throw std::logic_error("rounds of an index are missing");
  // The positions behind the last window are at the beginning of the first one.
  for (uint64_t round = 0; !overflow_.empty(); ++round) {
    size_ = std::min(window_, capacity_ - round * window_);
    const size_t bytes = size_ * sizeof(IndexEntry);
    for (size_t at = 0; at < bytes;) {
      const ssize_t count = pread(file_, reinterpret_cast<char*>(entries_.data()) + at, bytes - at,
                                  static_cast<off_t>(begin_of(round) + at));
      if (count <= 0) fail(path_, "cannot be read");
      at += static_cast<size_t>(count);
    }
    put_carried();
    write_window(round);
  }
  write(&header_, sizeof header_, 0);
  if (sync && fsync(file_) != 0) fail(path_, "cannot be written to the disk");
}

// Writes a window to the file, and starts its transfer to the disk, which continues while the next window is
// built.
void IndexWriter::write_window(uint64_t round) {
  const size_t bytes = size_ * sizeof(IndexEntry);
  const uint64_t begin = begin_of(round);
  write(entries_.data(), bytes, begin);
  sync_file_range(file_, static_cast<off_t>(begin), static_cast<off_t>(bytes), SYNC_FILE_RANGE_WRITE);
}

void IndexWriter::write(const void* data, size_t bytes, uint64_t offset) {
  for (size_t at = 0; at < bytes;) {
    const ssize_t count =
        pwrite(file_, static_cast<const char*>(data) + at, bytes - at, static_cast<off_t>(offset + at));
    if (count < 0) fail(path_, "cannot be written");
    at += static_cast<size_t>(count);
  }
}

}  // namespace rec_sdk
