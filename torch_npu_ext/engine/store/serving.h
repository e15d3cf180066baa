// Serving of tables from saves. Lookups read an index and files of rows, all mapped read-only, so that
// several processes share their memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "torch_npu_ext/engine/store/index_file.h"

namespace rec_sdk {

// The format of the stored weights of a row: floats, or `dim` codes of 8 or 4 bits. Of two 4-bit codes in a
// byte, the first is in the low bits. The codes are followed by a scale and a bias without padding, as
// float32 for 8-bit and float16 for 4-bit codes. A weight is code * scale + bias, where each operation is
// rounded to float32. PyTorch's `embedding_bag_byte` and `embedding_bag_4bit` have the same format.
enum class RowFormat { kFloat32, kFloat16, kBFloat16, kInt8, kInt4 };
RowFormat row_format(const std::string& name);  // F32, F16, BF16, Q8, Q4; throws std::invalid_argument
int64_t row_bytes(RowFormat format, int64_t dim);

struct ServedFile {
  std::string path;
  int64_t weight_begin, rows;  // offset of the weights in the file in bytes; number of rows
};

struct ServedSave {
  std::string index, id;
  std::vector<ServedFile> files;
};

// Bags of lookups. Bag b has the ids from index offsets[b] up to offsets[b + 1].
struct BagLookups {
  const int64_t* ids;
  const int64_t* offsets;  // [bags + 1], ascending from 0
  int64_t bags;
  const float* weights;  // weight of each lookup; null for weights of 1
  bool mean;
};

// A table in a save and the saves that it is based on. Lookups may run on several threads.
class ServedTable {
 public:
  // `saves` are ordered newest first. Throws DiskError, and std::invalid_argument for damaged or wrong files.
  ServedTable(const std::vector<ServedSave>& saves, RowFormat format, int64_t dim);

  // Copies the stored weights of ids to `out`, uint8 [count, row_bytes]; for an unknown id, copies `missing`
  // [row_bytes]. Unless `found` is null, sets found[i] to whether ids[i] is known. All three lookup functions
  // throw std::invalid_argument for a damaged index.
  void lookup(const int64_t* ids, int64_t count, const char* missing, char* out, bool* found) const;
  // Like lookup(), but `out` is float32 [count, dim], and all elements of an unknown id's row are `missing`.
  void lookup_floats(const int64_t* ids, int64_t count, float missing, float* out, bool* found) const;
  // Writes the sum or mean of the rows of each bag to `out`, float32 [bags, dim], and 0 for an empty bag.
  // Rows are added in the same order as in the operator lookup_pooled. Bags are computed in parallel.
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
  // Calls use(begin, end, rows) for each block [begin, end) of ids, with the row of each id of the block, or
  // null for an unknown id.
  template <class Use>
  void each_block(const int64_t* ids, int64_t count, bool* found, const Use& use) const;
  template <class Stored>
  void pool(const BagLookups& lookups, const Stored& stored, float* out) const;

  std::vector<Layer> layers_;
  RowFormat format_;
  int64_t dim_, row_bytes_;
};

}  // namespace rec_sdk
