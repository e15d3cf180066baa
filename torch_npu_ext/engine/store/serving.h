// Tables of a save, for serving: lookups through an index and the files of rows, all mapped read-only and
// shared by processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torch_npu_ext/engine/store/index_file.h"

namespace rec_sdk {

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
    std::unique_ptr<IndexFile> index;
    std::vector<std::unique_ptr<MappedFile>> files;
    std::vector<Rows> rows;
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
