// Folders of saves: the latest save, and those that it follows.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "torch_npu_ext/serving/saves.h"

namespace rec_sdk {

using Chain = std::vector<std::shared_ptr<const Save>>;

// Saves in some folders. Each manifest is read once, and again only after its file has changed. All functions
// throw SaveError.
class SaveArchive {
 public:
  // `folders`: of saves, or saves. `table`: as `read_save` has it.
  SaveArchive(std::vector<std::string> folders, std::string table)
      : folders_(std::move(folders)), table_(std::move(table)) {}

  Path latest() const;
  // The save and those that it follows, the newest first.
  Chain chain(const Path& save);

 private:
  using Stamp = std::tuple<dev_t, ino_t, off_t, int64_t, int64_t>;  // of the file of a manifest
  struct Known {
    Stamp stamp;
    std::shared_ptr<const Save> save;
  };
  using SavesById = std::multimap<std::string, std::shared_ptr<const Save>>;

  static Stamp stamp_of(const Path& save);
  std::shared_ptr<const Save> read(const Path& folder, std::map<Path, Known>& read_now) const;
  SavesById read_all(const Path& root, std::map<Path, Known>& read_now) const;

  std::vector<std::string> folders_;
  std::string table_;
  std::map<Path, Known> known_;  // by the folders of saves
};

}  // namespace rec_sdk
