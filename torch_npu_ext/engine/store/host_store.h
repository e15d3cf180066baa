// The host store of one table, which maps rows to records. Records never move. A page of memory is committed
// when the first row on it is written, and released when no written row is left on it. Alternatively, the
// records are in a file: extend() then reserves disk space for all rows, and only shrink() releases it.
//
// The records are divided into chunks. A chunk starts with small pages and switches to huge pages as soon as
// small pages save no more than half of the memory. A small table thus takes a few KiB, as does each row of a
// large, sparsely filled table. A chunk uses huge pages from the start if at least half of the rows before it
// are written.
//
// The caller must serialize calls that change the store, with the engine's lock. Meanwhile has(), read() and
// copy() of mapped rows may run on any thread without the lock, because chunks never move and an atomic bit
// per row records whether it is written. These bits do not order accesses to the records: if one thread reads
// a record while another thread writes it, they need other synchronization. forget() and clear() also require
// that no thread copies the rows that they drop.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "op_kernels/common/isa.h"
#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/store/store_file.h"
#include "torch_npu_ext/engine/store/stored_records.h"

namespace rec_sdk {

class HostStore {
 public:
  HostStore(const StoredRecords& records, MemoryGuard* guard, std::unique_ptr<StoreFile> file = nullptr);

  // Makes rows [0, rows) addressable without committing memory for them. Throws std::bad_alloc, DiskError.
  void extend(int64_t rows);
  bool on_disk() const { return file_ != nullptr; }

  // Returns whether the row is written. Precondition of all calls: extend() was called for more than `row`
  // rows.
  bool has(int64_t row) const { return has(chunk_of(row), row); }
  const char* find(int64_t row) const {  // returns the stored record, or null if the row is not written
    const Chunk& chunk = chunk_of(row);
    return has(chunk, row) ? record(chunk, row) : nullptr;
  }
  bool read(int64_t row, char* record) const {  // writes `record` in the cache's format
    const char* const stored = find(row);
    if (stored != nullptr) records_.load(stored, record);
    return stored != nullptr;
  }
  REC_SDK_INLINE void prefetch(int64_t row) const {
    const char* const begin = find(row);
    if (begin == nullptr) return;
    for (int64_t at = 0; at < record_bytes_; at += kCacheLine) __builtin_prefetch(begin + at, 0, 2);
  }

  // The steps of write(). copy() may run on several threads for different rows.
  void map(int64_t row);  // allocates the memory of mark() and copy(); throws std::bad_alloc
  void mark(int64_t row) noexcept;
  void copy(int64_t row, const char* data) const { records_.save(data, record(chunk_of(row), row)); }
  void write(int64_t row, const char* data);
  // Writes rows [row, row + count), whose records are `bytes` bytes apart in `data`. The memory is committed
  // with one call per chunk.
  void write_run(int64_t row, int64_t count, const char* data, int64_t bytes);

  void forget(int64_t row) noexcept;  // makes the row unwritten

  // Announces that the records of these rows will be accessed soon, so that all records that are only on disk
  // are requested together. Rows that were never written are skipped.
  template <class Row>
  void will_need(const Row* rows, int64_t count) const noexcept;

  int64_t written_rows() const { return written_rows_; }
  int64_t committed_bytes() const { return committed_bytes_; }  // bytes of committed memory
  int64_t disk_bytes() const { return file_ ? file_->bytes() : 0; }
  void clear();            // makes all rows unwritten; releases the memory and its address space
  void shrink() noexcept;  // after clear(): releases the disk space; no row is addressable before extend()

 private:
  using Word = std::atomic<uint64_t>;
  struct Chunk {
    HugeBuffer memory;
    FileMapping mapping;                            // used instead of `memory` by a store on disk
    std::unique_ptr<uint32_t[]> rows_on_huge_page;  // number of written rows that touch each huge page
    uint16_t* rows_on_small_page = nullptr;  // likewise for small pages; null once the chunk uses huge pages
    int64_t huge_pages = 0;                  // number of huge pages that written rows touch
    int64_t committed = 0;                   // committed bytes of `memory`
    std::atomic<char*> records{nullptr};     // start of `memory` or `mapping`, for threads without the lock
    // One bit per row, set if the row is written. This pointer is stored last, with release, so that readers
    // that see it also see `records`.
    std::atomic<Word*> written{nullptr};
  };
  // A block of chunks. Both buffers have a part for each chunk, which takes no memory before a row of the
  // chunk is written.
  struct Block {
    std::unique_ptr<Chunk[]> chunks;
    HugeBuffer bits;           // the words of Chunk::written
    HugeBuffer rows_on_pages;  // the counters of Chunk::rows_on_small_page
  };
  static constexpr int64_t kCacheLine = 64;
  static constexpr int kFirstBlockLog = 2;
  static constexpr int kBlocks = 64 - kFirstBlockLog;

  // The location of a chunk: its block and its index there. Block b has 4 * 2^b chunks, so chunks never move
  // when blocks are added.
  struct Place {
    int block;
    int64_t chunk;
  };
  Place place_of(int64_t row) const {
    const uint64_t place = static_cast<uint64_t>(row >> shift_) + (uint64_t{1} << kFirstBlockLog);
    const int log = 63 - __builtin_clzll(place);
    return {log - kFirstBlockLog, static_cast<int64_t>(place - (uint64_t{1} << log))};
  }
  static int64_t chunks_in(int block) { return int64_t{1} << (kFirstBlockLog + block); }
  Chunk& chunk_of(int64_t row) const {
    const Place place = place_of(row);
    return blocks_[place.block].chunks[place.chunk];
  }
  bool has(const Chunk& chunk, int64_t row) const {
    const Word* const written = chunk.written.load(std::memory_order_acquire);
    const int64_t i = row & mask_;
    return written != nullptr && (written[i >> 6].load(std::memory_order_relaxed) >> (i & 63) & 1) != 0;
  }
  char* record(const Chunk& chunk, int64_t row) const {
    return chunk.records.load(std::memory_order_acquire) + (row & mask_) * record_bytes_;
  }
  template <class Visit>  // calls visit(page) for the pages of 2^log bytes that a chunk's i-th record touches
  void for_each_page(int64_t i, int log, Visit visit) const;
  void commit(Chunk* chunk, int64_t i) noexcept;
  void release(Chunk* chunk, int64_t i) noexcept;
  void use_huge_pages(Chunk* chunk) noexcept;
  void count_committed(Chunk* chunk, int64_t bytes) noexcept;
  int64_t chunk_words() const { return (mask_ >> 6) + 1; }
  int64_t chunk_pages() const;       // number of huge pages of a chunk
  int64_t file_chunk_bytes() const;  // a multiple of the page size

  StoredRecords records_;
  int64_t record_bytes_;
  MemoryGuard* guard_;
  std::unique_ptr<StoreFile> file_;
  int shift_;  // rows per chunk = 1 << shift_
  int64_t mask_;
  int small_log_;  // small pages have 2^small_log_ bytes
  Block blocks_[kBlocks];
  int block_count_ = 0;
  int64_t written_rows_ = 0;
  int64_t committed_bytes_ = 0;
};

}  // namespace rec_sdk
