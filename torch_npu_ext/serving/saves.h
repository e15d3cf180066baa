// Saves: what the manifest of one says of a table, and where the tensors of its files lie.
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

// A save, and of its tables those of one name. All functions here throw SaveError.
struct Save {
  Path folder;
  std::string id, base, previous;  // previous: empty for a full save
  int64_t sequence;                // from 1 on for a delta, 0 for a full save
  std::vector<std::string> folders;
  std::vector<SavedTable> tables;
  std::vector<SavedFile> files;  // of removed ids and of rows of these tables

  // The files of a table, in the order in which they are to be read.
  std::vector<SavedFile> files_of(const std::string& key) const;
};

constexpr char kManifest[] = "manifest.json";

// `table`: the name of tables, or the key of one.
Save read_save(const Path& folder, const std::string& table);

// Where the tensors of a file of a save lie in it.
struct Tensors {
  Path path;
  int64_t ids, weight;  // weight: -1 where there is none
};
Tensors open_tensors(const Save& save, const SavedFile& file, const SavedTable& table);

[[noreturn]] void fail(const Path& path, const std::string& what);

}  // namespace rec_sdk
