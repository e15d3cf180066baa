#include "torch_npu_ext/engine/store/host_store.h"

#include <algorithm>
#include <cstring>

namespace rec_sdk {
namespace {

// A chunk only reserves address space. Chunks are so large that a table of hundreds of GiB stays below the
// system's limit on the number of mappings.
constexpr int64_t kChunkBytes = 8 * static_cast<int64_t>(kHugePage);
// A chunk of a file costs only one mapping, so chunks are larger here: 16 TiB stay below that limit.
constexpr int64_t kFileChunkBytes = int64_t{256} << 20;
constexpr int64_t kHuge = static_cast<int64_t>(kHugePage);
constexpr int kHugeLog = __builtin_ctzll(kHugePage);
constexpr int64_t kFilePage = 4096;
// The sample in will_need() contains every 32nd row.
constexpr int64_t kSampleEvery = 32;

}  // namespace

HostStore::HostStore(const StoredRecords& records, MemoryGuard* guard, std::unique_ptr<StoreFile> file)
    : records_(records),
      record_bytes_(records.bytes()),
      guard_(guard),
      file_(std::move(file)),
      shift_(0),
      small_log_(__builtin_ctzll(small_page())) {
  const int64_t chunk = file_ ? kFileChunkBytes : kChunkBytes;
  while ((record_bytes_ << (shift_ + 1)) <= chunk) ++shift_;
  mask_ = (int64_t{1} << shift_) - 1;
}

void HostStore::extend(int64_t rows) {
  if (file_) file_->allocate(file_chunk_bytes() * (rows >> shift_) + record_bytes_ * (rows & mask_));
  const int64_t chunks = (rows + mask_) >> shift_;
  while (((int64_t{1} << block_count_) - 1) << kFirstBlockLog < chunks) {
    const int64_t count = chunks_in(block_count_);
    Block block;
    block.bits = HugeBuffer(static_cast<size_t>(count * chunk_words()) * sizeof(Word), Pages::kSmall);
    if (!file_) {
      const int64_t pages = count * chunk_pages() << (kHugeLog - small_log_);
      block.rows_on_pages = HugeBuffer(static_cast<size_t>(pages) * sizeof(uint16_t), Pages::kSmall);
    }
    block.chunks = std::make_unique<Chunk[]>(static_cast<size_t>(count));
    blocks_[block_count_++] = std::move(block);
  }
}

int64_t HostStore::chunk_pages() const { return ((mask_ + 1) * record_bytes_ + kHuge - 1) / kHuge; }

int64_t HostStore::file_chunk_bytes() const {
  return ((mask_ + 1) * record_bytes_ + kFilePage - 1) / kFilePage * kFilePage;
}

void HostStore::map(int64_t row) {
  const Place place = place_of(row);
  Block& block = blocks_[place.block];
  Chunk& chunk = block.chunks[place.chunk];
  if (chunk.written.load(std::memory_order_relaxed) != nullptr) return;
  const int64_t before = row & ~mask_;
  if (file_) {
    chunk.mapping = file_->map((row >> shift_) * file_chunk_bytes(), file_chunk_bytes());
  } else {
    const bool dense = before > 0 && 2 * written_rows_ >= before;
    const size_t pages = static_cast<size_t>(chunk_pages());
    chunk.rows_on_huge_page = std::make_unique<uint32_t[]>(pages);
    chunk.memory = HugeBuffer(pages * kHugePage, dense ? Pages::kHuge : Pages::kSmall);
    chunk.rows_on_small_page = dense ? nullptr
                                     : reinterpret_cast<uint16_t*>(block.rows_on_pages.data()) +
                                           (place.chunk * chunk_pages() << (kHugeLog - small_log_));
  }
  Word* const words = reinterpret_cast<Word*>(block.bits.data()) + place.chunk * chunk_words();
  chunk.records.store(file_ ? chunk.mapping.data() : chunk.memory.data(), std::memory_order_release);
  chunk.written.store(words, std::memory_order_release);
}

template <class Visit>
void HostStore::for_each_page(int64_t i, int log, Visit visit) const {
  const int64_t begin = i * record_bytes_, last = (begin + record_bytes_ - 1) >> log;
  for (int64_t page = begin >> log; page <= last; ++page) visit(page);
}

void HostStore::count_committed(Chunk* chunk, int64_t bytes) noexcept {
  if (bytes == 0) return;
  chunk->committed += bytes;
  committed_bytes_ += bytes;
  guard_->count_committed(bytes);
}

void HostStore::commit(Chunk* chunk, int64_t i) noexcept {
  uint16_t* const small = chunk->rows_on_small_page;
  int64_t huge_pages = 0, small_pages = 0;
  for_each_page(i, kHugeLog, [&](int64_t page) { huge_pages += chunk->rows_on_huge_page[page]++ == 0; });
  chunk->huge_pages += huge_pages;
  if (small == nullptr) return count_committed(chunk, huge_pages * kHuge);
  for_each_page(i, small_log_, [&](int64_t page) { small_pages += small[page]++ == 0; });
  count_committed(chunk, small_pages << small_log_);
  if (2 * chunk->committed >= chunk->huge_pages * kHuge) use_huge_pages(chunk);
}

void HostStore::use_huge_pages(Chunk* chunk) noexcept {
  chunk->memory.use_huge_pages();
  chunk->rows_on_small_page = nullptr;
  count_committed(chunk, chunk->huge_pages * kHuge - chunk->committed);
}

void HostStore::release(Chunk* chunk, int64_t i) noexcept {
  uint16_t* const small = chunk->rows_on_small_page;
  const auto drop = [&](int64_t page, int log) {
    chunk->memory.release(static_cast<size_t>(page) << log, size_t{1} << log);
    count_committed(chunk, -(int64_t{1} << log));
  };
  for_each_page(i, kHugeLog, [&](int64_t page) {
    if (--chunk->rows_on_huge_page[page] != 0) return;
    --chunk->huge_pages;
    if (small == nullptr) drop(page, kHugeLog);
  });
  if (small == nullptr) return;
  for_each_page(i, small_log_, [&](int64_t page) {
    if (--small[page] == 0) drop(page, small_log_);
  });
}

void HostStore::mark(int64_t row) noexcept {
  Chunk& chunk = chunk_of(row);
  const int64_t i = row & mask_;
  Word& word = chunk.written.load(std::memory_order_relaxed)[i >> 6];
  const uint64_t bits = word.load(std::memory_order_relaxed), bit = uint64_t{1} << (i & 63);
  if ((bits & bit) != 0) return;
  word.store(bits | bit, std::memory_order_relaxed);
  ++written_rows_;
  if (!file_) commit(&chunk, i);
}

void HostStore::forget(int64_t row) noexcept {
  Chunk& chunk = chunk_of(row);
  Word* const words = chunk.written.load(std::memory_order_relaxed);
  if (words == nullptr) return;
  const int64_t i = row & mask_;
  Word& word = words[i >> 6];
  const uint64_t bits = word.load(std::memory_order_relaxed), bit = uint64_t{1} << (i & 63);
  if ((bits & bit) == 0) return;
  word.store(bits & ~bit, std::memory_order_relaxed);
  --written_rows_;
  if (!file_) release(&chunk, i);  // a file keeps the space for the next record
}

void HostStore::write(int64_t row, const char* data) {
  map(row);
  mark(row);
  copy(row, data);
}

void HostStore::write_run(int64_t row, int64_t count, const char* data, int64_t bytes) {
  while (count > 0) {
    const int64_t first = row & mask_, some = std::min(count, mask_ + 1 - first);
    map(row);
    Chunk& chunk = chunk_of(row);
    if (!file_) {
      chunk.memory.populate(static_cast<size_t>(first * record_bytes_),
                            static_cast<size_t>(some * record_bytes_));
    }
    char* target = record(chunk, row);
    for (int64_t i = 0; i < some; ++i, target += record_bytes_, data += bytes) {
      mark(row + i);
      records_.save(data, target);
    }
    row += some;
    count -= some;
  }
}

// Advising the system takes one call per row. If all rows of a sample are in memory, no advice is given.
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
  guard_->count_committed(-committed_bytes_);
  for (int b = 0; b < block_count_; ++b) {
    Block& block = blocks_[b];
    for (int64_t c = 0; c < chunks_in(b); ++c) {
      Chunk& chunk = block.chunks[c];
      chunk.written.store(nullptr, std::memory_order_release);
      chunk.records.store(nullptr, std::memory_order_release);
      chunk.rows_on_huge_page.reset();
      chunk.rows_on_small_page = nullptr;
      chunk.huge_pages = chunk.committed = 0;
      HugeBuffer().swap(chunk.memory);
      chunk.mapping = FileMapping();
    }
    block.bits.release(0, block.bits.size());
    block.rows_on_pages.release(0, block.rows_on_pages.size());
  }
  written_rows_ = committed_bytes_ = 0;
}

}  // namespace rec_sdk
