#include "torch_npu_ext/engine/store/serving.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/base/parallel.h"
#include "torch_npu_ext/engine/store/served_rows.h"

namespace rec_sdk {
namespace {

constexpr int64_t kBlock = 64;  // number of lookups that are prefetched together
constexpr size_t kCacheLine = 64;
constexpr int64_t kPartsPerThread = 4;  // more parts than threads, because bags differ in length

}  // namespace

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
    layer.index = std::make_unique<IndexFile>(save.index, save.id);
    for (const ServedFile& file : save.files) {
      auto mapped = std::make_unique<MappedFile>(file.path);
      const auto size = static_cast<int64_t>(mapped->size());
      if (file.weight_begin < 0 || file.rows < 0 || file.weight_begin > size ||
          saturated_product(file.rows, row_bytes_) > size - file.weight_begin) {
        throw std::invalid_argument(file.path + ": damaged, it has " + std::to_string(mapped->size()) +
                                    " bytes");
      }
      layer.rows.push_back({mapped->data() + file.weight_begin, file.rows});
      layer.files.push_back(std::move(mapped));
    }
    layers_.push_back(std::move(layer));
  }
}

// Returns the stored weights of an id; null for an unknown or removed id.
const char* ServedTable::find(int64_t id, uint64_t hash) const {
  for (const Layer& layer : layers_) {
    const IndexEntry* const entry = layer.index->find(id, hash);
    if (entry == nullptr) continue;
    if (entry->file == kRemoved) return nullptr;
    if (entry->file > layer.rows.size() || entry->row >= layer.rows[entry->file - 1].count) {
      throw std::invalid_argument(layer.name + ": damaged; remove it, and it is built again");
    }
    return layer.rows[entry->file - 1].weights + static_cast<int64_t>(entry->row) * row_bytes_;
  }
  return nullptr;
}

template <class Use>
void ServedTable::each_block(const int64_t* ids, int64_t count, bool* found, const Use& use) const {
  uint64_t hashes[2][kBlock];
  const char* rows[kBlock];
  const auto prefetch_block = [&](int64_t begin, uint64_t* hash) {
    const int64_t end = std::min(begin + kBlock, count);
    for (int64_t i = begin; i < end; ++i) {
      hash[i - begin] = index_hash(ids[i]);
      for (const Layer& layer : layers_) layer.index->prefetch(hash[i - begin]);
    }
  };
  prefetch_block(0, hashes[0]);
  const size_t bytes = static_cast<size_t>(row_bytes_);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    const uint64_t* const hash = hashes[begin / kBlock % 2];
    for (int64_t i = begin; i < end; ++i) {
      const char* const row = rows[i - begin] = find(ids[i], hash[i - begin]);
      for (size_t at = 0; row != nullptr && at < bytes; at += kCacheLine) __builtin_prefetch(row + at);
      if (found != nullptr) found[i] = row != nullptr;
    }
    prefetch_block(begin + kBlock, hashes[(begin / kBlock + 1) % 2]);
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
    // Each part computes the bags that begin in its share of the lookups. The last part also computes the
    // empty bags behind the last lookup.
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
