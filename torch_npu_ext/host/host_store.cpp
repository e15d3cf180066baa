#include "torch_npu_ext/host/host_store.h"

#include <cstring>

namespace rec_sdk {
namespace {

// Address space only: big enough that a table of hundreds of GiB stays below the system's limit on mappings.
constexpr int64_t kChunkBytes = 8 * static_cast<int64_t>(kHugePage);
constexpr int64_t kPage = static_cast<int64_t>(kHugePage);

}  // namespace

HostStore::HostStore(int64_t record_bytes, MemoryGuard* guard)
    : record_bytes_(record_bytes), guard_(guard), shift_(0) {
  while ((record_bytes << (shift_ + 1)) <= kChunkBytes) ++shift_;
  mask_ = (int64_t{1} << shift_) - 1;
}

void HostStore::extend(int64_t rows) {
  const int64_t chunks = (rows + mask_) >> shift_;
  while (((int64_t{1} << block_count_) - 1) << kFirstBlockLog < chunks) {
    blocks_[block_count_] = std::make_unique<Chunk[]>(size_t{1} << (kFirstBlockLog + block_count_));
    ++block_count_;
  }
}

void HostStore::map(int64_t row) {
  Chunk& chunk = chunk_of(row);
  if (chunk.bits) return;
  HugeBuffer memory(static_cast<size_t>((mask_ + 1) * record_bytes_));
  auto rows_on_page = std::make_unique<uint32_t[]>((memory.size() + kHugePage - 1) / kHugePage);
  chunk.bits = std::make_unique<Word[]>(static_cast<size_t>(mask_ >> 6) + 1);
  for (int64_t w = 0; w <= mask_ >> 6; ++w) chunk.bits[w].store(0, std::memory_order_relaxed);
  chunk.memory = std::move(memory);
  chunk.rows_on_page = std::move(rows_on_page);
  chunk.records.store(chunk.memory.data(), std::memory_order_release);
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
  for_each_page(i, [&](int64_t page) {
    if (--chunk.rows_on_page[page] != 0) return;
    chunk.memory.give_back(static_cast<size_t>(page) * kHugePage, kHugePage);
    count_committed(-kPage);
  });
}

void HostStore::write(int64_t row, const char* data) {
  map(row);
  mark(row);
  std::memcpy(record(row), data, static_cast<size_t>(record_bytes_));
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
    }
  }
  written_rows_ = 0;
}

}  // namespace rec_sdk
