// Lookup of one table's rows in saves of rec_sdk_torch, for C++ programs without Python and torch. Results
// are bit-identical to those from rec_sdk_torch.serving.TableReader; see docs/serving.md.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define REC_SDK_SERVING_API __attribute__((visibility("default")))

namespace rec_sdk {

// Thrown if a save is missing, damaged, or written by a later version. The message names the file.
class REC_SDK_SERVING_API SaveError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Pooling { kSum, kMean };

// A reader of one table. It maps files into memory, which all processes with readers of these files share.
// Threads may share a reader: a lookup uses one save and the saves it is based on, even while another thread
// calls refresh().
class REC_SDK_SERVING_API TableReader {
 public:
  // Opens the latest save. `folders`: each is a folder of saves, or a save. `table`: the table's name, or its
  // key in the manifest. `missing`: the value of every element that a lookup returns for an id without a row
  // in the saves. Throws SaveError, or std::invalid_argument if `folders` is empty.
  TableReader(std::vector<std::string> folders, std::string table, float missing = 0.0f);
  TableReader(const std::string& folder, std::string table, float missing = 0.0f);
  ~TableReader();
  TableReader(TableReader&&) noexcept;
  TableReader& operator=(TableReader&&) noexcept;

  // Switches to the latest save, and returns whether it is another save than before. If SaveError is thrown,
  // the reader keeps its present save.
  bool refresh();

  std::string save() const;  // path of the save that lookups use
  int64_t dim() const;
  int64_t rows() const;             // number of rows when the table was saved
  std::string weight_type() const;  // F32, F16, BF16, Q8 or Q4

  // Writes the weights of ids to out, [count, dim], converted from their stored type to float32. Sets
  // found[i] to whether ids[i] has a row, unless `found` is null. All lookups throw SaveError if an index is
  // damaged.
  void lookup(const int64_t* ids, int64_t count, float* out, bool* found = nullptr) const;

  // Writes the sum or mean of the rows of each bag to out, [bags, dim]. Bag b contains the ids with indices
  // from offsets[b] to offsets[b + 1] - 1. `weights`: the weight of each id, or null. The result of an empty
  // bag is 0. Runs on the calling thread. Throws std::invalid_argument unless offsets start at 0 and do not
  // decrease.
  void lookup_pooled(const int64_t* ids, const int64_t* offsets, int64_t bags, const float* weights,
                     Pooling pooling, float* out) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rec_sdk
