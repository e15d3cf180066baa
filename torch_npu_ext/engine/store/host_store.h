// The host store of one table: row -> record. Records never move; memory is committed at the first write of a
// row, and given back page by page when no row on a page is written any more. Or the records are in a file,
// all of whose rows have their place on the disk since extend(); it gives none back before shrink().
//
// The pages of a chunk are small at first, and huge as soon as small ones would save less than half of them:
// a table of a few rows takes a few KiB, and so does each row of a large table that has few. Where half of
// the rows before a chunk are written, it is huge from the start.
//
// Calls that change the store need exclusive access among themselves (the engine's lock). Beside them, has(),
// read() and copy() of mapped rows may run on any thread without it: chunks never move, and whether
// a row is written is an atomic bit. They order no more than that: a thread that reads the bytes of a record
// which another one writes has to wait for it by other means. forget() and clear() also need that no thread
// copies to or from the rows that they drop.
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

  // Rows [0, rows) become addressable; commits no memory. Throws std::bad_alloc, DiskError.
  void extend(int64_t rows);
  bool on_disk() const { return file_ != nullptr; }

  // Whether the row has ever been written. Precondition of all calls: row < the rows of extend().
  bool has(int64_t row) const { return has(chunk_of(row), row); }
  const char* find(int64_t row) const {  // the stored record; null for a row that was never written
    const Chunk& chunk = chunk_of(row);
    return has(chunk, row) ? record(chunk, row) : nullptr;
  }
  bool read(int64_t row, char* record) const {  // as the cache has it; false for a row that was never written
    const char* const stored = find(row);
    if (stored != nullptr) records_.load(stored, record);
    return stored != nullptr;
  }
  REC_SDK_INLINE void prefetch(int64_t row) const {
    const char* const begin = find(row);
    if (begin == nullptr) return;
    for (int64_t at = 0; at < record_bytes_; at += kCacheLine) __builtin_prefetch(begin + at, 0, 2);
  }

  // write() in parts. The last may run on several threads, for rows that are not the same.
  void map(int64_t row);  // all that can fail: throws std::bad_alloc
  void mark(int64_t row) noexcept;
  void copy(int64_t row, const char* data) const { records_.save(data, record(chunk_of(row), row)); }
  void write(int64_t row, const char* data);
  // Rows [row, row + count), whose records are `bytes` apart. The pages that they need come all at once.
  void write_run(int64_t row, int64_t count, const char* data, int64_t bytes);

  void forget(int64_t row) noexcept;  // the row was never written

  // The records of written rows among these will be read or written soon: those that are on the disk only are
  // asked for, all at once.
  template <class Row>
  void will_need(const Row* rows, int64_t count) const noexcept;

  int64_t written_rows() const { return written_rows_; }
  int64_t committed_bytes() const { return committed_bytes_; }  // of memory
  int64_t disk_bytes() const { return file_ ? file_->bytes() : 0; }
  void clear();            // forgets every row and gives the memory back, address space too
  void shrink() noexcept;  // gives the disk back too. Precondition: no row is addressable until extend()

 private:
  using Word = std::atomic<uint64_t>;
  struct Chunk {
    HugeBuffer memory;
    FileMapping mapping;                            // in place of `memory`, of a store on disk
    std::unique_ptr<uint32_t[]> rows_on_huge_page;  // written rows that touch each of `memory`
    uint16_t* rows_on_small_page = nullptr;         // the same, while the pages are small
    int64_t huge_pages = 0;                         // those of `memory` that a written row touches
    int64_t committed = 0;                          // bytes of `memory`
    std::atomic<char*> records{nullptr};  // of the memory or the mapping, for threads without the lock
    std::atomic<Word*> written{nullptr};  // a bit per row: it is written; set last
  };
  // Both arrays have parts for each chunk; what no written row needs of them takes no memory.
  struct Block {
    std::unique_ptr<Chunk[]> chunks;
    HugeBuffer bits;           // words of Chunk::written
    HugeBuffer rows_on_pages;  // of Chunk::rows_on_small_page
  };
  static constexpr int64_t kCacheLine = 64;
  static constexpr int kFirstBlockLog = 2;
  static constexpr int kBlocks = 64 - kFirstBlockLog;

  // Block b has 4 * 2^b chunks, so none ever moves.
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
  template <class Visit>  // visit(page) of the pages of 2^log bytes that a chunk's i-th record touches
  void for_each_page(int64_t i, int log, Visit visit) const;
  void commit(Chunk* chunk, int64_t i) noexcept;
  void give_back(Chunk* chunk, int64_t i) noexcept;
  void use_huge_pages(Chunk* chunk) noexcept;
  void count_committed(Chunk* chunk, int64_t bytes) noexcept;
  int64_t chunk_words() const { return (mask_ >> 6) + 1; }
  int64_t chunk_pages() const;       // huge ones
  int64_t file_chunk_bytes() const;  // whole pages

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
