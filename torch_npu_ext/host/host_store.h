// The host store of one table: row -> record. Records never move; memory is committed at the first write of a
// row.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "torch_npu_ext/host/memory.h"

namespace rec_sdk {

class HostStore {
 public:
  HostStore(int64_t record_bytes, MemoryGuard* guard);

  void extend(int64_t rows);  // rows [0, rows) become addressable; commits nothing

  // Whether the row has ever been written. Precondition of all calls: row < the rows of extend().
  bool has(int64_t row) const {
    const Chunk& chunk = chunks_[row >> shift_];
    const int64_t i = row & mask_;
    return chunk.memory.data() != nullptr && (chunk.written[i >> 6] >> (i & 63) & 1) != 0;
  }
  const char* read(int64_t row) const { return record(row); }  // precondition: has(row)

  // write() in parts. The last may run on several threads, for rows that are not the same.
  void map(int64_t row);  // all that can fail: throws std::bad_alloc
  void mark(int64_t row);
  char* record(int64_t row) const {
    return chunks_[row >> shift_].memory.data() + (row & mask_) * record_bytes_;
  }
  void write(int64_t row, const char* data);

  int64_t written_rows() const { return written_rows_; }
  int64_t committed_bytes() const { return committed_bytes_; }
  void clear();  // forgets every row and gives the memory back

 private:
  struct Chunk {
    HugeBuffer memory;
    std::unique_ptr<uint64_t[]> written;  // one bit per row
    uint32_t committed = 0;               // one bit per huge page
  };

  void count_pages(Chunk& chunk, int64_t first_byte);

  int64_t record_bytes_;
  MemoryGuard* guard_;
  int shift_;  // rows per chunk = 1 << shift_
  int64_t mask_;
  std::vector<Chunk> chunks_;
  int64_t written_rows_ = 0;
  int64_t committed_bytes_ = 0;
};

}  // namespace rec_sdk
