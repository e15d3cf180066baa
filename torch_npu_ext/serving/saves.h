// Folders of saves: the latest one, what its manifest says, and those that it follows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace rec_sdk {

using Path = std::filesystem::path;

struct SavedFile {
  std::string path, role, table;
  int64_t rank, layer, rows, bytes, offset;  // offset: in a pack, 0 for a file by itself
  int64_t header_checksum;
  bool packed;
};

struct SavedTable {
  std::string key, name, module, weight_type;
  int64_t dim, rows;
  bool hashed;
};

// A save. All functions here throw SaveError.
struct Save {
  Path folder;
  std::string id, base, previous;  // previous: empty for a full save
  int64_t sequence;
  std::vector<std::string> folders;
  std::vector<SavedTable> tables;
  std::vector<SavedFile> files;

  // Files of removed ids and of rows of a table, in the order in which they are to be read.
  std::vector<SavedFile> files_of(const std::string& key) const;
};

Path latest_save(const std::vector<std::string>& folders);
Save read_save(const Path& folder);
// The save and those that it follows, the newest first.
std::vector<Save> chain_of(const Path& save, const std::vector<std::string>& folders);

// Where the tensors of a file of a save lie in it.
struct Tensors {
  Path path;
  int64_t ids, weight;  // weight: -1 where there is none
};
// `row_bytes`: of a row of weights.
Tensors open_tensors(const Save& save, const SavedFile& file, const SavedTable& table, int64_t row_bytes);

}  // namespace rec_sdk
