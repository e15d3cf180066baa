#include "torch_npu_ext/engine/store/serving.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/base/parallel.h"
#include "torch_npu_ext/engine/store/served_rows.h"

namespace rec_sdk {
namespace {

constexpr char kMagic[] = "rec_sdk index 1\n";
constexpr int64_t kBlock = 64;  // lookups whose memory is asked for at once
constexpr size_t kCacheLine = 64;
constexpr int64_t kPartsPerThread = 4;  // bags of one part may be longer than those of another

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

RowFormat row_format(const std::string& name) {
  const std::pair<const char*, RowFormat> known[] = {{"F32", RowFormat::kFloat32},
                                                     {"F16", RowFormat::kFloat16},
                                                     {"BF16", RowFormat::kBFloat16},
                                                     {"Q8", RowFormat::kInt8},
                                                     {"Q4", RowFormat::kInt4}};
  for (const auto& [text, format] : known) {
    if (name == text) return format;
  }
  throw std::invalid_argument("rows of the type " + name + ", expected F32, F16, BF16, Q8 or Q4");
}

int64_t row_bytes(RowFormat format, int64_t dim) {
  switch (format) {
    case RowFormat::kFloat32:
      return 4 * dim;
    case RowFormat::kFloat16:
    case RowFormat::kBFloat16:
      return 2 * dim;
    case RowFormat::kInt8:
      return dim + 8;
    default:
      return (dim + 1) / 2 + 4;
  }
}

ServedTable::ServedTable(const std::vector<ServedSave>& saves, RowFormat format, int64_t dim)
    : format_(format), dim_(dim), row_bytes_(rec_sdk::row_bytes(format, dim)) {
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
          mapped->size() < static_cast<size_t>(file.weight_begin + file.rows * row_bytes_)) {
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

template <class Use>
void ServedTable::each_block(const int64_t* ids, int64_t count, bool* found, const Use& use) const {
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
      const char* const row = rows[i - begin] = find(ids[i], hash[i - begin]);
      for (size_t at = 0; row != nullptr && at < bytes; at += kCacheLine) __builtin_prefetch(row + at);
      if (found != nullptr) found[i] = row != nullptr;
    }
    ask(begin + kBlock, hashes[(begin / kBlock + 1) % 2]);
    use(begin, end, rows);
  }
}

void ServedTable::lookup(const int64_t* ids, int64_t count, const char* missing, char* out,
                         bool* found) const {
  each_block(ids, count, found, [&](int64_t begin, int64_t end, const char* const* rows) {
    for (int64_t i = begin; i < end; ++i) {
      const char* const row = rows[i - begin];
      std::memcpy(out + i * row_bytes_, row == nullptr ? missing : row, static_cast<size_t>(row_bytes_));
    }
  });
}

void ServedTable::lookup_floats(const int64_t* ids, int64_t count, float missing, float* out,
                                bool* found) const {
  with_rows(format_, dim_, missing, [&](const auto& stored) {
    each_block(ids, count, found, [&](int64_t begin, int64_t end, const char* const* rows) {
      for (int64_t i = begin; i < end; ++i) {
        const auto row = stored.row(rows[i - begin], 0);
        float* const to = out + i * dim_;
        for (int64_t k = 0; k < dim_; ++k) to[k] = row[k];
      }
    });
  });
}

template <class Stored>
void ServedTable::pool(const BagLookups& lookups, const Stored& stored, float* out) const {
  const int64_t count = lookups.offsets[lookups.bags];
  const int64_t parts = worth_threads(count) ? kPartsPerThread * parallel_threads() : 1;
  std::mutex mutex;
  std::exception_ptr error;
  run_pieces(parts, [&](int64_t part) noexcept {
    const int64_t *const first = lookups.offsets, *const end = first + lookups.bags;
    // Bags that begin in this part of the lookups; the last part has those behind all lookups too.
    const int64_t from = std::lower_bound(first, end, count * part / parts) - first;
    const int64_t to =
        part + 1 == parts ? lookups.bags : std::lower_bound(first, end, count * (part + 1) / parts) - first;
    if (from == to) return;
    try {
      const int64_t low = first[from];
      std::vector<const char*> rows(static_cast<size_t>(first[to] - low));
      each_block(lookups.ids + low, first[to] - low, nullptr,
                 [&](int64_t b, int64_t e, const char* const* some) {
                   std::copy(some, some + (e - b), &rows[static_cast<size_t>(b)]);
                 });
      pool_bags(lookups, stored, rows.data(), from, to, dim_, out);
    } catch (...) {
      const std::lock_guard<std::mutex> guard(mutex);
      error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

void ServedTable::lookup_pooled(const BagLookups& lookups, float missing, float* out) const {
  with_rows(format_, dim_, missing, [&](const auto& stored) { pool(lookups, stored, out); });
}

}  // namespace rec_sdk
