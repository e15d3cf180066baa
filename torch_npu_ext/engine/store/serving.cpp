#include "torch_npu_ext/engine/store/serving.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "torch_npu_ext/engine/base/errors.h"

namespace rec_sdk {
namespace {

constexpr char kMagic[] = "rec_sdk index 1\n";
constexpr int64_t kBlock = 64;  // lookups whose memory is asked for at once
constexpr size_t kCacheLine = 64;

// Part of the file format: the finalizer of SplitMix64 (Steele, Lea, Flood 2014).
uint64_t hash_of(int64_t id) {
  uint64_t x = static_cast<uint64_t>(id) + 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw DiskError(errno, path, what);
}

uint64_t capacity_for(int64_t ids) {
  uint64_t capacity = 64;
  while (capacity < static_cast<uint64_t>(ids) + static_cast<uint64_t>(ids) / 2) capacity *= 2;
  return capacity;
}

}  // namespace

WholeFile::WholeFile(const std::string& path, bool writable) : path_(path) {
  const int file = open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
  if (file < 0) fail(path, "cannot be opened");
  struct stat about;
  const bool known = fstat(file, &about) == 0;
  size_ = known ? static_cast<size_t>(about.st_size) : 0;
  void* mapped = nullptr;
  if (size_ > 0) {
    mapped = mmap(nullptr, size_, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file, 0);
  }
  close(file);
  if (!known || mapped == MAP_FAILED) fail(path, "cannot be mapped into memory");
  data_ = static_cast<char*>(mapped);
  // Rows of a batch are no neighbours: reading ahead would push others out.
  if (size_ > 0) madvise(data_, size_, MADV_RANDOM);
}

WholeFile::~WholeFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

void WholeFile::sync() const {
  if (size_ > 0 && msync(data_, size_, MS_SYNC) != 0) fail(path_, "cannot be written to the disk");
}

IndexWriter::IndexWriter(const std::string& path, int64_t most_ids, const std::string& save)
    : most_ids_(most_ids) {
  const uint64_t capacity = capacity_for(most_ids);
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) fail(path, "cannot be created");
  const off_t bytes = static_cast<off_t>(sizeof(IndexHeader) + capacity * sizeof(IndexEntry));
  errno = posix_fallocate(file, 0, bytes);
  const int error = errno;
  close(file);
  errno = error;
  if (error != 0) fail(path, "an index of " + std::to_string(bytes) + " bytes has no room on the disk");
  file_ = std::make_unique<WholeFile>(path, true);
  std::memcpy(header()->magic, kMagic, sizeof header()->magic);
  header()->capacity = capacity;
  std::memcpy(header()->save, save.data(), std::min(save.size(), sizeof header()->save));
  entries_ = reinterpret_cast<IndexEntry*>(file_->data() + sizeof(IndexHeader));
  mask_ = capacity - 1;
}

void IndexWriter::put(int64_t id, uint32_t file, uint32_t row) {
  uint64_t at = hash_of(id) & mask_;
  while (entries_[at].file != 0 && entries_[at].id != id) at = (at + 1) & mask_;
  if (entries_[at].file == 0) {
    if (static_cast<int64_t>(header()->entries) >= most_ids_) {
      throw std::length_error("an index for " + std::to_string(most_ids_) + " ids is full");
    }
    ++header()->entries;
  }
  entries_[at] = {id, file, row};
}

void IndexWriter::add(const int64_t* ids, int64_t count, uint32_t file, uint32_t first_row) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kBlock < count) __builtin_prefetch(&entries_[hash_of(ids[i + kBlock]) & mask_], 1);
    put(ids[i], file + 1, first_row + static_cast<uint32_t>(i));
  }
}

void IndexWriter::remove(const int64_t* ids, int64_t count) {
  for (int64_t i = 0; i < count; ++i) put(ids[i], kRemoved, 0);
}

void IndexWriter::finish() { file_->sync(); }

ServedTable::ServedTable(const std::vector<ServedSave>& saves, int64_t row_bytes) : row_bytes_(row_bytes) {
  for (const ServedSave& save : saves) {
    Layer layer;
    layer.name = save.index;
    layer.index = std::make_unique<WholeFile>(save.index, false);
    const auto* header = reinterpret_cast<const IndexHeader*>(layer.index->data());
    const size_t size = layer.index->size();
    const bool whole = size >= sizeof(IndexHeader) &&
                       std::memcmp(header->magic, kMagic, sizeof header->magic) == 0 &&
                       header->capacity > 0 && (header->capacity & (header->capacity - 1)) == 0 &&
                       header->entries < header->capacity &&
                       (size - sizeof(IndexHeader)) / sizeof(IndexEntry) == header->capacity;
    if (!whole)
      throw std::invalid_argument(save.index + ": no index, or damaged; remove it to have it made anew");
    if (save.id.size() != sizeof header->save ||
        std::memcmp(header->save, save.id.data(), sizeof header->save) != 0) {
      throw std::invalid_argument(save.index + ": of another save; remove it to have it made anew");
    }
    layer.entries = reinterpret_cast<const IndexEntry*>(layer.index->data() + sizeof(IndexHeader));
    layer.mask = header->capacity - 1;
    for (const ServedFile& file : save.files) {
      auto mapped = std::make_unique<WholeFile>(file.path, false);
      if (file.weight_begin < 0 || file.rows < 0 ||
          mapped->size() < static_cast<size_t>(file.weight_begin + file.rows * row_bytes)) {
        throw std::invalid_argument(file.path + ": damaged, it has " + std::to_string(mapped->size()) +
                                    " bytes");
      }
      layer.rows.push_back({mapped->data() + file.weight_begin, file.rows});
      layer.files.push_back(std::move(mapped));
    }
    layers_.push_back(std::move(layer));
  }
}

// The weights of an id, or null.
const char* ServedTable::find(int64_t id, uint64_t hash) const {
  for (const Layer& layer : layers_) {
    uint64_t probes = 0;
    for (uint64_t at = hash & layer.mask;; at = (at + 1) & layer.mask) {
      const IndexEntry& entry = layer.entries[at];
      if (entry.file == 0 || ++probes > layer.mask) break;
      if (entry.id != id) continue;
      if (entry.file == kRemoved) return nullptr;
      if (entry.file > layer.rows.size() || entry.row >= layer.rows[entry.file - 1].count) {
        throw std::invalid_argument(layer.name + ": damaged; remove it to have it made anew");
      }
      return layer.rows[entry.file - 1].weights + static_cast<int64_t>(entry.row) * row_bytes_;
    }
  }
  return nullptr;
}

void ServedTable::lookup(const int64_t* ids, int64_t count, const char* missing, char* out,
                         bool* found) const {
  uint64_t hashes[2][kBlock];
  const char* rows[kBlock];
  const auto ask = [&](int64_t begin, uint64_t* hash) {  // for the entries of a block
    const int64_t end = std::min(begin + kBlock, count);
    for (int64_t i = begin; i < end; ++i) {
      hash[i - begin] = hash_of(ids[i]);
      for (const Layer& layer : layers_) __builtin_prefetch(&layer.entries[hash[i - begin] & layer.mask]);
    }
  };
  ask(0, hashes[0]);
  const size_t bytes = static_cast<size_t>(row_bytes_);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    const uint64_t* const hash = hashes[begin / kBlock % 2];
    for (int64_t i = begin; i < end; ++i) {
      const char* const row = find(ids[i], hash[i - begin]);
      rows[i - begin] = row == nullptr ? missing : row;
      for (size_t at = 0; row != nullptr && at < bytes; at += kCacheLine) __builtin_prefetch(row + at);
      if (found != nullptr) found[i] = row != nullptr;
    }
    ask(begin + kBlock, hashes[(begin / kBlock + 1) % 2]);
    for (int64_t i = begin; i < end; ++i) std::memcpy(out + i * row_bytes_, rows[i - begin], bytes);
  }
}

}  // namespace rec_sdk
