// Lookup of rows of one table in saves of rec_sdk_torch, from C++ without Python and torch. The results have
// the same bits as rec_sdk_torch.serving.TableReader; see docs/serving.md.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define REC_SDK_SERVING_API __attribute__((visibility("default")))

namespace rec_sdk {

// Thrown for a save that is missing, damaged, or of a later version. The message names the file.
class REC_SDK_SERVING_API SaveError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Pooling { kSum, kMean };

// A reader of one table. Files are mapped into memory, which processes share. Threads may share a reader: a
// lookup uses one save and the saves it is based on, also while another thread calls refresh().
class REC_SDK_SERVING_API TableReader {
 public:
  // Opens the latest save. `folders`: a folder of saves, a save, or several folders. `table`: the table's
  // name, or its key in the manifest. `missing`: every element of the row of an id that the saves do not
  // contain. Throws SaveError, and std::invalid_argument without a folder.
  TableReader(std::vector<std::string> folders, std::string table, float missing = 0.0f);
  TableReader(const std::string& folder, std::string table, float missing = 0.0f);
  ~TableReader();
  TableReader(TableReader&&) noexcept;
  TableReader& operator=(TableReader&&) noexcept;

  // Switches to the latest save, and returns whether there was a later one. On SaveError the reader keeps its
  // present save.
  bool refresh();

  std::string save() const;  // path of the save that lookups use
  int64_t dim() const;
  int64_t rows() const;             // number of rows when the table was saved
  std::string weight_type() const;  // F32, F16, BF16, Q8 or Q4

  // Writes the weights of ids to out, [count, dim] as float32, whatever their stored type; sets found[i],
  // unless it is null. All lookups throw SaveError for a damaged index.
  void lookup(const int64_t* ids, int64_t count, float* out, bool* found = nullptr) const;

  // Computes the sum, or mean, of the rows of each bag, [bags, dim]; bag b has the ids [offsets[b], offsets[b
  // + 1]). `weights`: the weight of each id, or null. The result of an empty bag is 0. Runs on the calling
  // thread. Throws std::invalid_argument unless offsets ascend from 0.
  void lookup_pooled(const int64_t* ids, const int64_t* offsets, int64_t bags, const float* weights,
                     Pooling pooling, float* out) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rec_sdk
