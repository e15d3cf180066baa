#include "torch_npu_ext/host/host_store.h"

#include <algorithm>
#include <cstring>

namespace rec_sdk {
namespace {

// Address space only: big enough that a table of hundreds of GiB stays below the system's limit on mappings.
constexpr int64_t kChunkBytes = 8 * static_cast<int64_t>(kHugePage);
// Without an own cost, and a mapping each: 16 TiB stay below that limit.
constexpr int64_t kFileChunkBytes = int64_t{256} << 20;
constexpr int64_t kPage = static_cast<int64_t>(kHugePage);
constexpr int64_t kFilePage = 4096;
constexpr int64_t kSampleEvery = 32;

}  // namespace

HostStore::HostStore(const StoredRecords& records, MemoryGuard* guard, std::unique_ptr<StoreFile> file)
    : records_(records), record_bytes_(records.bytes()), guard_(guard), file_(std::move(file)), shift_(0) {
  const int64_t chunk = file_ ? kFileChunkBytes : kChunkBytes;
  while ((record_bytes_ << (shift_ + 1)) <= chunk) ++shift_;
  mask_ = (int64_t{1} << shift_) - 1;
}

void HostStore::extend(int64_t rows) {
  if (file_) file_->allocate(file_chunk_bytes() * (rows >> shift_) + record_bytes_ * (rows & mask_));
  const int64_t chunks = (rows + mask_) >> shift_;
  while (((int64_t{1} << block_count_) - 1) << kFirstBlockLog < chunks) {
    blocks_[block_count_] = std::make_unique<Chunk[]>(size_t{1} << (kFirstBlockLog + block_count_));
    ++block_count_;
  }
}

int64_t HostStore::file_chunk_bytes() const {
  return ((mask_ + 1) * record_bytes_ + kFilePage - 1) / kFilePage * kFilePage;
}

void HostStore::map(int64_t row) {
  Chunk& chunk = chunk_of(row);
  if (chunk.bits) return;
  HugeBuffer memory;
  FileMapping mapping;
  std::unique_ptr<uint32_t[]> rows_on_page;
  if (file_) {
    mapping = file_->map((row >> shift_) * file_chunk_bytes(), file_chunk_bytes());
  } else {
    memory = HugeBuffer(static_cast<size_t>((mask_ + 1) * record_bytes_));
    rows_on_page = std::make_unique<uint32_t[]>((memory.size() + kHugePage - 1) / kHugePage);
  }
  chunk.bits = std::make_unique<Word[]>(static_cast<size_t>(mask_ >> 6) + 1);
  for (int64_t w = 0; w <= mask_ >> 6; ++w) chunk.bits[w].store(0, std::memory_order_relaxed);
  chunk.memory = std::move(memory);
  chunk.mapping = std::move(mapping);
  chunk.rows_on_page = std::move(rows_on_page);
  chunk.records.store(file_ ? chunk.mapping.data() : chunk.memory.data(), std::memory_order_release);
  chunk.written.store(chunk.bits.get(), std::memory_order_release);
}

template <class Visit>
void HostStore::for_each_page(int64_t i, Visit visit) const {
  const int64_t begin = i * record_bytes_;
  for (int64_t page = begin / kPage; page <= (begin + record_bytes_ - 1) / kPage; ++page) visit(page);
}

void HostStore::count_committed(int64_t bytes) {
  committed_bytes_ += bytes;
  guard_->count_committed(bytes);
}

void HostStore::mark(int64_t row) noexcept {
  Chunk& chunk = chunk_of(row);
  const int64_t i = row & mask_;
  Word& word = chunk.bits[i >> 6];
  const uint64_t bits = word.load(std::memory_order_relaxed), bit = uint64_t{1} << (i & 63);
  if ((bits & bit) != 0) return;
  word.store(bits | bit, std::memory_order_relaxed);
  ++written_rows_;
  if (file_) return;
  for_each_page(i, [&](int64_t page) {
    if (chunk.rows_on_page[page]++ == 0) count_committed(kPage);
  });
}

void HostStore::forget(int64_t row) noexcept {
  Chunk& chunk = chunk_of(row);
  if (!chunk.bits) return;
  const int64_t i = row & mask_;
  Word& word = chunk.bits[i >> 6];
  const uint64_t bits = word.load(std::memory_order_relaxed), bit = uint64_t{1} << (i & 63);
  if ((bits & bit) == 0) return;
  word.store(bits & ~bit, std::memory_order_relaxed);
  --written_rows_;
  if (file_) return;  // its place on the disk is kept for the next row
  for_each_page(i, [&](int64_t page) {
    if (--chunk.rows_on_page[page] != 0) return;
    chunk.memory.give_back(static_cast<size_t>(page) * kHugePage, kHugePage);
    count_committed(-kPage);
  });
}

void HostStore::write(int64_t row, const char* data) {
  map(row);
  mark(row);
  copy(row, data);
}

// Asking costs a call of the system for each row. Where all rows of a sample are in memory nobody does.
template <class Row>
void HostStore::will_need(const Row* rows, int64_t count) const noexcept {
  if (!file_) return;
  const auto absent = [this](int64_t row) {
    const char* const found = find(row);
    return found != nullptr && !StoreFile::in_memory(found);
  };
  int64_t i = 0;
  while (i < count && !absent(rows[i])) i += kSampleEvery;
  if (i >= count) return;
  const char *begin = nullptr, *end = nullptr;
  for (i = 0; i < count; ++i) {
    const char* const found = find(rows[i]);
    if (found == nullptr) continue;
    if (found != end) {
      if (begin != nullptr) StoreFile::will_need(begin, end);
      begin = found;
    }
    end = found + record_bytes_;
  }
  if (begin != nullptr) StoreFile::will_need(begin, end);
}

template void HostStore::will_need(const uint32_t* rows, int64_t count) const noexcept;
template void HostStore::will_need(const int64_t* rows, int64_t count) const noexcept;

void HostStore::shrink() noexcept {
  if (file_) file_->shrink();
}

void HostStore::clear() {
  count_committed(-committed_bytes_);
  for (int b = 0; b < block_count_; ++b) {
    for (int64_t c = 0; c < int64_t{1} << (kFirstBlockLog + b); ++c) {
      Chunk& chunk = blocks_[b][c];
      chunk.written.store(nullptr, std::memory_order_release);
      chunk.records.store(nullptr, std::memory_order_release);
      chunk.bits.reset();
      chunk.rows_on_page.reset();
      HugeBuffer().swap(chunk.memory);
      chunk.mapping = FileMapping();
    }
  }
  written_rows_ = 0;
}

}  // namespace rec_sdk
