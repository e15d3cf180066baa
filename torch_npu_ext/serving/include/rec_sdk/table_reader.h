// Looks up rows of one table in saves of rec_sdk_torch, from C++: no Python, no torch. The same saves, the
// same bits as rec_sdk_torch.serving.TableReader; docs/serving.md has both.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define REC_SDK_SERVING_API __attribute__((visibility("default")))

namespace rec_sdk {

// A save that is missing, damaged or of a later version. The message names the file.
class REC_SDK_SERVING_API SaveError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Pooling { kSum, kMean };

// Files are mapped into memory, and processes share them. Threads may share a reader: a lookup sees one save
// with all that it follows, also while another thread refreshes.
class REC_SDK_SERVING_API TableReader {
 public:
  // `folders`: that of the saves, or one save, or several folders, of which the latest save is read. `table`:
  // its name, or its key in the manifest. `missing`: every element of the row of an id that the saves do not
  // have. Throws SaveError, and std::invalid_argument without a folder.
  TableReader(std::vector<std::string> folders, std::string table, float missing = 0.0f);
  TableReader(const std::string& folder, std::string table, float missing = 0.0f);
  ~TableReader();
  TableReader(TableReader&&) noexcept;
  TableReader& operator=(TableReader&&) noexcept;

  // Goes on to the latest save; whether there was a later one. Throws SaveError, and stays where it was.
  bool refresh();

  std::string save() const;  // path of the save that lookups see
  int64_t dim() const;
  int64_t rows() const;             // when the table was saved
  std::string weight_type() const;  // F32, F16, BF16, Q8 or Q4

  // Weights of the ids, [count, dim] as float32, whatever their type; and, unless null, whether each is
  // there. All lookups throw SaveError for a damaged index.
  void lookup(const int64_t* ids, int64_t count, float* out, bool* found = nullptr) const;

  // The sum, or mean, of the rows of each bag, [bags, dim]; bag b has ids [offsets[b], offsets[b + 1]).
  // `weights`: of each id, or null. An empty bag gives zeros. Runs on the caller's thread. Throws
  // std::invalid_argument for offsets that do not ascend from 0.
  void lookup_pooled(const int64_t* ids, const int64_t* offsets, int64_t bags, const float* weights,
                     Pooling pooling, float* out) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace rec_sdk
