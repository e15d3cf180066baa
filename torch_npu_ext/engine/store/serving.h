// Tables of a save, for serving: an index file, id -> place, and lookups through it and the files of rows,
// all mapped read-only and shared by processes.
//
// An index file: a header of 64 bytes, then `capacity` entries, a power of two, by open addressing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace rec_sdk {

struct IndexHeader {
  char magic[16];  // "rec_sdk index 1\n"
  uint64_t capacity;
  uint64_t entries;  // ids, removed ones too
  char save[32];     // id of the save that it is of
};
static_assert(sizeof(IndexHeader) == 64);

struct IndexEntry {
  int64_t id;
  uint32_t file;  // place in the list of files plus one; 0 = empty, kRemoved
  uint32_t row;
};
constexpr uint32_t kRemoved = 0xFFFFFFFFu;

// A file mapped into memory as a whole.
class WholeFile {
 public:
  WholeFile(const std::string& path, bool writable);  // throws DiskError
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;
  ~WholeFile();
  char* data() const { return data_; }
  size_t size() const { return size_; }
  void sync() const;  // throws DiskError

 private:
  std::string path_;
  char* data_ = nullptr;
  size_t size_ = 0;
};

// Writes an index into a new file, of which the page cache holds what memory allows. A later entry
// replaces an earlier one of the same id.
class IndexWriter {
 public:
  IndexWriter(const std::string& path, int64_t most_ids, const std::string& save);  // throws DiskError
  // Ids of the rows [first_row, first_row + count) of a file. Throws std::length_error beyond most_ids.
  void add(const int64_t* ids, int64_t count, uint32_t file, uint32_t first_row);
  void remove(const int64_t* ids, int64_t count);
  void finish();  // on the disk. Throws DiskError

 private:
  void put(int64_t id, uint32_t file, uint32_t row);
  IndexHeader* header() const { return reinterpret_cast<IndexHeader*>(file_->data()); }

  int64_t most_ids_;
  std::unique_ptr<WholeFile> file_;
  IndexEntry* entries_;
  uint64_t mask_;
};

// How the weights of a row are stored: as floats, or as `dim` codes of 8 or 4 bits, the first of a byte in
// its low bits, behind which lie a scale and a bias, unaligned: float32 of 8 bits, float16 of 4. A weight is
// code * scale + bias, each rounded to float32. PyTorch's `embedding_bag_byte` and `embedding_bag_4bit` have
// the same rows.
enum class RowFormat { kFloat32, kFloat16, kBFloat16, kInt8, kInt4 };
RowFormat row_format(const std::string& name);  // F32, F16, BF16, Q8, Q4; throws std::invalid_argument
int64_t row_bytes(RowFormat format, int64_t dim);

struct ServedFile {
  std::string path;
  int64_t weight_begin, rows;  // of its weights in the file
};

struct ServedSave {
  std::string index, id;
  std::vector<ServedFile> files;
};

// Bags of lookups: those of bag b are ids [offsets[b], offsets[b + 1]).
struct BagLookups {
  const int64_t* ids;
  const int64_t* offsets;  // [bags + 1], ascending from 0
  int64_t bags;
  const float* weights;  // of each lookup, or null
  bool mean;
};

// A table as a chain of saves has it. Lookups may run on several threads.
class ServedTable {
 public:
  // `saves`: the newest first. Throws DiskError, and std::invalid_argument for files that do not fit.
  ServedTable(const std::vector<ServedSave>& saves, RowFormat format, int64_t dim);

  // Weights of the ids as they are stored, uint8 [count, row_bytes], or `missing` [row_bytes]; and, unless
  // null, whether each is there. All lookups throw std::invalid_argument for an index that is damaged.
  void lookup(const int64_t* ids, int64_t count, const char* missing, char* out, bool* found) const;
  // The same as float32 [count, dim]; `missing` in every element.
  void lookup_floats(const int64_t* ids, int64_t count, float missing, float* out, bool* found) const;
  // Sums or means of the rows of each bag, float32 [bags, dim], in the order of the operator lookup_pooled;
  // zeros of an empty bag. Threads share the bags.
  void lookup_pooled(const BagLookups& lookups, float missing, float* out) const;

  int64_t dim() const { return dim_; }
  int64_t row_bytes() const { return row_bytes_; }

 private:
  struct Rows {
    const char* weights;
    int64_t count;
  };
  struct Layer {
    std::unique_ptr<WholeFile> index;
    std::vector<std::unique_ptr<WholeFile>> files;
    std::vector<Rows> rows;
    const IndexEntry* entries;
    uint64_t mask;
    std::string name;
  };
  const char* find(int64_t id, uint64_t hash) const;
  // Calls use(begin, end, rows) for blocks of ids: the row of each, or null.
  template <class Use>
  void each_block(const int64_t* ids, int64_t count, bool* found, const Use& use) const;
  template <class Stored>
  void pool(const BagLookups& lookups, const Stored& stored, float* out) const;

  std::vector<Layer> layers_;
  RowFormat format_;
  int64_t dim_, row_bytes_;
};

}  // namespace rec_sdk
