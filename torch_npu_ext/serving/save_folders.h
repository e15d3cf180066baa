// Search in folders of saves: the latest save, and the saves that a save is based on.
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

// The saves in several folders. A manifest is read again only if its file has changed. All functions throw
// SaveError.
class SaveArchive {
 public:
  // `folders`: each is a folder of saves, or a save. `table`: same as for read_save().
  SaveArchive(std::vector<std::string> folders, std::string table)
      : folders_(std::move(folders)), table_(std::move(table)) {}

  Path latest() const;
  // Returns the save and the saves that it is based on, newest first.
  Chain chain(const Path& save);

 private:
  using Stamp = std::tuple<dev_t, ino_t, off_t, int64_t, int64_t>;  // identifies a version of a manifest file
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
  std::map<Path, Known> known_;  // saves read so far, by folder
};

}  // namespace rec_sdk
