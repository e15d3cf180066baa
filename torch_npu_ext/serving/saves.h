// Saves: the part of a manifest that describes a table, and the positions of tensors in the table's files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace rec_sdk {

using Path = std::filesystem::path;

struct SavedFile {
  std::string path, role, table;
  int64_t rank, layer, rows, bytes, offset;  // offset within a pack file; 0 for a separate file
  int64_t header_checksum;
  bool packed;
};

struct SavedTable {
  std::string key, name, module, weight_type;
  int64_t dim, rows;
  bool hashed;
};

// The part of a save that concerns the tables of one name. All functions in this file throw SaveError.
struct Save {
  Path folder;
  std::string id, base, previous;  // previous is empty for a full save
  int64_t sequence;                // 0 for a full save, 1 for the first delta
  std::vector<std::string> folders;
  std::vector<SavedTable> tables;
  std::vector<SavedFile> files;  // files of rows and of removed ids of these tables

  // Returns the files of a table, in the order in which they must be read.
  std::vector<SavedFile> files_of(const std::string& key) const;
};

constexpr char kManifest[] = "manifest.json";

// Reads the manifest of a save. `table`: the name of one or more tables, or the key of one table.
Save read_save(const Path& folder, const std::string& table);

// The positions of the tensors in a file of a save.
struct Tensors {
  Path path;
  int64_t ids, weight;  // offsets; `weight` is -1 if the file has no weights
};
Tensors open_tensors(const Save& save, const SavedFile& file, const SavedTable& table);

[[noreturn]] void fail(const Path& path, const std::string& what);

}  // namespace rec_sdk
