// The index file of a table in a save, which maps each id to a file and a row. A header of 64 bytes is
// followed by `capacity` entries. They form a hash map with open addressing: an id is at its hash, scaled to
// the capacity, or behind it with no empty entry in between. In version 1 of the format the capacity is a
// power of two, and an id is at its hash modulo the capacity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "torch_npu_ext/engine/base/memory.h"

namespace rec_sdk {

struct IndexHeader {
  char magic[16];  // "rec_sdk index 2\n"
  uint64_t capacity;
  uint64_t entries;  // number of entries that are not empty
  char save[32];     // id of the save that the index belongs to
};
static_assert(sizeof(IndexHeader) == 64);

struct IndexEntry {
  int64_t id;
  uint32_t file;  // one plus the index in the list of files; 0 if the entry is empty; or kRemoved
  uint32_t row;
};
static_assert(sizeof(IndexEntry) == 16);
constexpr uint32_t kRemoved = 0xFFFFFFFFu;

// The hash of an id, which is part of the file format: the finalizer of SplitMix64 (Steele, Lea, Flood 2014).
inline uint64_t index_hash(int64_t id) {
  uint64_t x = static_cast<uint64_t>(id) + 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Returns the position in [0, capacity) where the search for an id begins.
inline uint64_t index_position(uint64_t hash, uint64_t capacity) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(hash) * capacity >> 64);
}

// A file that is mapped into memory as a whole, read-only.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // throws DiskError
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();
  const char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

// An index file, opened for reading.
class IndexFile {
 public:
  // Opens an index file of the save with id `save`. Throws DiskError, and std::invalid_argument if the file
  // is not an index of this save.
  IndexFile(const std::string& path, const std::string& save);
  // Returns the entry of an id, or null if the index does not have the id.
  const IndexEntry* find(int64_t id, uint64_t hash) const {
    for (uint64_t probes = 0, at = position(hash); probes < capacity_; ++probes) {
      if (entries_[at].file == 0) return nullptr;
      if (entries_[at].id == id) return &entries_[at];
      at = at + 1 == capacity_ ? 0 : at + 1;
    }
    return nullptr;
  }
  void prefetch(uint64_t hash) const { __builtin_prefetch(&entries_[position(hash)]); }
  // Returns whether the other index maps every id to the same row as this one; the order of the entries may
  // differ. Returns false if the other index is damaged.
  bool same(const IndexFile& other) const;

 private:
  uint64_t position(uint64_t hash) const {
    return version_ == 1 ? hash & (capacity_ - 1) : index_position(hash, capacity_);
  }
  const IndexHeader& header() const { return *reinterpret_cast<const IndexHeader*>(file_.data()); }

  MappedFile file_;
  const IndexEntry* entries_;
  uint64_t capacity_;
  int version_;
};

// Writes an index to a new file. As ids may be added in any order and a large index does not fit into memory,
// the index is written in rounds, one window of entries in each. In every round the caller must add all
// entries again, in the same order; the round stores the entries that belong to its window. A later entry of
// an id replaces an earlier one of the same round.
class IndexWriter {
 public:
  // `window` is the number of entries in memory at a time. Throws DiskError, std::bad_alloc, and
  // std::invalid_argument if it is 0.
  IndexWriter(const std::string& path, int64_t most_ids, const std::string& save, uint64_t window = kWindow);
  IndexWriter(const IndexWriter&) = delete;
  IndexWriter& operator=(const IndexWriter&) = delete;
  ~IndexWriter();

  uint64_t rounds() const { return (capacity_ + window_ - 1) / window_; }
  // Adds the ids of rows [first_row, first_row + count) of a file. Throws std::length_error if there are more
  // than most_ids ids.
  void add(const int64_t* ids, int64_t count, uint32_t file, uint32_t first_row);
  void remove(const int64_t* ids, int64_t count);
  void end_round();  // throws DiskError
  // Completes the file; if `sync`, also waits until it is on the disk. Throws DiskError, and std::logic_error
  // if a round is missing.
  void finish(bool sync);

  static constexpr uint64_t kWindow = uint64_t{1} << 24;  // 256 MiB

 private:
  uint64_t begin_of(uint64_t round) const {  // byte in the file
    return sizeof(IndexHeader) + round * window_ * sizeof(IndexEntry);
  }
  template <class Entry>
  void put_all(const int64_t* ids, int64_t count, const Entry& entry);
  bool put(uint64_t at, const IndexEntry& entry);
  void put_carried();
  void write_window(uint64_t round);
  void write(const void* data, size_t bytes, uint64_t offset);

  std::string path_;
  int file_ = -1;
  IndexHeader header_{};
  int64_t most_ids_;
  uint64_t capacity_, window_;
  uint64_t size_;  // number of entries of the present window; the last window may be smaller
  uint64_t round_ = 0;
  HugeArray<IndexEntry> entries_;     // the entries of the present window
  std::vector<IndexEntry> overflow_;  // entries whose free position is behind the present window
};

}  // namespace rec_sdk
