#include "torch_npu_ext/host/host_store.h"

#include <cstring>

namespace rec_sdk {
namespace {

// Address space only: big enough that a table of hundreds of GiB stays below the system's limit on mappings.
constexpr int64_t kChunkBytes = 8 * static_cast<int64_t>(kHugePage);

}  // namespace

HostStore::HostStore(int64_t record_bytes, MemoryGuard* guard)
    : record_bytes_(record_bytes), guard_(guard), shift_(0) {
  while ((record_bytes << (shift_ + 1)) <= kChunkBytes) ++shift_;
  mask_ = (int64_t{1} << shift_) - 1;
}

void HostStore::extend(int64_t rows) {
  const size_t chunks = static_cast<size_t>((rows + mask_) >> shift_);
  if (chunks > chunks_.size()) chunks_.resize(chunks);
}

void HostStore::map(int64_t row) {
  Chunk& chunk = chunks_[row >> shift_];
  if (chunk.memory.data() != nullptr) return;
  auto written = std::make_unique<uint64_t[]>((mask_ >> 6) + 1);
  chunk.memory = HugeBuffer((mask_ + 1) * record_bytes_);
  chunk.written = std::move(written);
}

void HostStore::mark(int64_t row) {
  Chunk& chunk = chunks_[row >> shift_];
  const int64_t i = row & mask_;
  uint64_t& word = chunk.written[i >> 6];
  const uint64_t bit = uint64_t{1} << (i & 63);
  if ((word & bit) != 0) return;
  word |= bit;
  ++written_rows_;
  count_pages(chunk, i * record_bytes_);
}

void HostStore::write(int64_t row, const char* data) {
  map(row);
  mark(row);
  std::memcpy(record(row), data, record_bytes_);
}

void HostStore::count_pages(Chunk& chunk, int64_t first_byte) {
  const int64_t page = static_cast<int64_t>(kHugePage);
  for (int64_t p = first_byte / page; p <= (first_byte + record_bytes_ - 1) / page; ++p) {
    const uint32_t bit = 1u << p;
    if ((chunk.committed & bit) != 0) continue;
    chunk.committed |= bit;
    committed_bytes_ += page;
    guard_->count_committed(page);
  }
}

void HostStore::clear() {
  guard_->count_committed(-committed_bytes_);
  for (Chunk& chunk : chunks_) chunk = Chunk();
  written_rows_ = 0;
  committed_bytes_ = 0;
}

}  // namespace rec_sdk
