// Serving of tables from saves: lookups through an index and files of rows, all mapped read-only, so that
// processes share the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torch_npu_ext/engine/store/index_file.h"

namespace rec_sdk {

// The format of stored weights: floats, or `dim` codes of 8 or 4 bits, the first code of a byte in its low
// bits. Codes are followed by a scale and a bias, unaligned: float32 for 8 bits, float16 for 4. A weight is
// code * scale + bias, each operation rounded to float32. PyTorch's `embedding_bag_byte` and
// `embedding_bag_4bit` use the same rows.
enum class RowFormat { kFloat32, kFloat16, kBFloat16, kInt8, kInt4 };
RowFormat row_format(const std::string& name);  // F32, F16, BF16, Q8, Q4; throws std::invalid_argument
int64_t row_bytes(RowFormat format, int64_t dim);

struct ServedFile {
  std::string path;
  int64_t weight_begin, rows;  // position of the weights in the file, and number of rows
};

struct ServedSave {
  std::string index, id;
  std::vector<ServedFile> files;
};

// Bags of lookups; bag b has the ids [offsets[b], offsets[b + 1]).
struct BagLookups {
  const int64_t* ids;
  const int64_t* offsets;  // [bags + 1], ascending from 0
  int64_t bags;
  const float* weights;  // weight of each lookup, or null
  bool mean;
};

// A table in a chain of saves. Lookups may run on several threads.
class ServedTable {
 public:
  // `saves`: newest first. Throws DiskError, and std::invalid_argument for damaged or wrong files.
  ServedTable(const std::vector<ServedSave>& saves, RowFormat format, int64_t dim);

  // Copies the stored weights of ids to out, uint8 [count, row_bytes], or `missing` [row_bytes] for unknown
  // ids; sets found[i], unless it is null. All lookups throw std::invalid_argument for a damaged index.
  void lookup(const int64_t* ids, int64_t count, const char* missing, char* out, bool* found) const;
  // Like lookup(), with out as float32 [count, dim]; a missing row has `missing` in every element.
  void lookup_floats(const int64_t* ids, int64_t count, float missing, float* out, bool* found) const;
  // Computes the sum or mean of the rows of each bag, float32 [bags, dim], in the order of the operator
  // lookup_pooled; 0 for an empty bag. Bags are computed in parallel.
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
  // Calls use(begin, end, rows) for blocks of ids, with the row of each id, or null.
  template <class Use>
  void each_block(const int64_t* ids, int64_t count, bool* found, const Use& use) const;
  template <class Stored>
  void pool(const BagLookups& lookups, const Stored& stored, float* out) const;

  std::vector<Layer> layers_;
  RowFormat format_;
  int64_t dim_, row_bytes_;
};

}  // namespace rec_sdk
