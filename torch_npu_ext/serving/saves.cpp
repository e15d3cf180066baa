#include "torch_npu_ext/serving/saves.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <set>
#include <tuple>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/serving/include/rec_sdk/table_reader.h"
#include "torch_npu_ext/serving/json.h"

namespace rec_sdk {
namespace {

namespace fs = std::filesystem;

constexpr char kManifest[] = "manifest.json";
constexpr int64_t kLastVersion = 4;
constexpr int64_t kMostHeader = 1 << 20;

// CRC-32 of IEEE 802.3, as zlib has it.
uint32_t crc32(const char* data, size_t count, uint32_t before = 0) {
  static const std::array<uint32_t, 256> kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xEDB88320u : 0);
      table[i] = value;
    }
    return table;
  }();
  uint32_t sum = ~before;
  for (size_t i = 0; i < count; ++i) sum = sum >> 8 ^ kTable[(sum ^ static_cast<uint8_t>(data[i])) & 0xFF];
  return ~sum;
}

[[noreturn]] void fail(const Path& path, const std::string& what) {
  throw SaveError(path.string() + ": " + what);
}

// A plain file below the folder of a save, on the way to which there is no link.
void check_plain(const Path& folder, const std::string& inner) {
  Path at = folder;
  for (const Path& part : Path(inner)) {
    if (part == "." || part == ".." || part.is_absolute())
      fail(folder, "no file of a save is called " + inner);
    at /= part;
    std::error_code error;
    if (fs::is_symlink(at, error)) fail(at, "a link, which is not followed");
  }
  std::error_code error;
  if (!fs::is_regular_file(at, error)) fail(at, error ? error.message() : "no plain file, or not there");
}

std::string read_all(const Path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) fail(path, "cannot be read");
  return text;
}

// Whether the checksum of a manifest is that of its text without it.
bool is_right(const std::string& text) {
  const std::string before = "\n \"checksum\": ", behind = "\n \"created\": ";
  const size_t begin = text.find(before);
  if (begin == std::string::npos) return false;
  const size_t comma = text.find(',', begin);
  if (comma == std::string::npos || text.compare(comma + 1, behind.size(), behind) != 0) return false;
  const std::string digits = text.substr(begin + before.size(), comma - begin - before.size());
  const uint32_t sum = crc32(text.data() + comma + 1, text.size() - comma - 1, crc32(text.data(), begin));
  return digits == std::to_string(sum);
}

bool is_name(const std::string& name) {  // date and time of 14 digits, perhaps with microseconds
  const auto digits = [&](size_t begin, size_t count) {
    return std::all_of(name.begin() + static_cast<int64_t>(begin),
                       name.begin() + static_cast<int64_t>(begin + count),
                       [](char c) { return c >= '0' && c <= '9'; });
  };
  return (name.size() == 14 && digits(0, 14)) ||
         (name.size() == 21 && digits(0, 14) && name[14] == '.' && digits(15, 6));
}

std::vector<Path> saves_in(const Path& folder) {
  std::error_code error;
  if (fs::exists(folder / kManifest, error)) return {folder};
  std::vector<Path> found;
  fs::directory_iterator all(folder, error);
  if (error) fail(folder, "there is no such folder, or it cannot be read");
  for (const fs::directory_entry& each : all) {
    if (is_name(each.path().filename().string()) && fs::exists(each.path() / kManifest, error)) {
      found.push_back(each.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

Path resolved(const Path& path) {
  std::error_code error;
  const Path found = fs::canonical(path, error);
  if (error) fail(path, error.message());
  return found;
}

Save parse_save(const Path& folder, const Json& body) {
  Save save;
  save.folder = folder;
  save.id = body["id"].string();
  save.base = body["base"].string();
  if (!body["previous"].is_null()) save.previous = body["previous"].string();
  save.sequence = body["sequence"].integer();
  if (body.has("folders")) {
    for (const Json& each : body["folders"].list()) save.folders.push_back(each.string());
  }
  std::set<std::string> keys;
  for (const Json& t : body["tables"].list()) {
    save.tables.push_back({t["key"].string(), t["name"].string(), t["module"].string(),
                           t["weight_dtype"].string(), t["embedding_dim"].integer(), t["rows"].integer(),
                           t["hashed"].boolean()});
    const SavedTable& table = save.tables.back();
    if (table.dim < 1 || table.dim > INT32_MAX || table.rows < 0)
      throw std::invalid_argument("sizes of " + table.key);
    if (!keys.insert(table.key).second) throw std::invalid_argument("table " + table.key + " twice");
  }
  for (const Json& f : body["files"].list()) {
    const bool packed = f.has("offset");
    save.files.push_back({f["path"].string(), f["role"].string(), f["table"].string(), f["rank"].integer(),
                          f["layer"].integer(), f["rows"].integer(), f["bytes"].integer(),
                          packed ? f["offset"].integer() : 0, f["checksums"]["header"].integer(), packed});
    const SavedFile& file = save.files.back();
    if (file.rows < 0 || file.rows > UINT32_MAX || file.bytes < 8 || file.offset < 0) {
      throw std::invalid_argument("sizes of " + file.path);
    }
  }
  return save;
}

}  // namespace

std::vector<SavedFile> Save::files_of(const std::string& key) const {
  std::vector<SavedFile> found;
  for (const SavedFile& file : files) {
    if (file.table == key && (file.role == "removed" || file.role == "rows")) found.push_back(file);
  }
  const auto order = [](const SavedFile& f) {
    return std::make_tuple(f.layer, f.role == "rows", f.rank, f.path);
  };
  std::stable_sort(found.begin(), found.end(),
                   [&](const SavedFile& a, const SavedFile& b) { return order(a) < order(b); });
  return found;
}

Path latest_save(const std::vector<std::string>& folders) {
  Path latest;
  std::string name;
  for (const std::string& each : folders) {
    const std::vector<Path> saves = saves_in(each);
    if (saves.empty()) continue;
    const std::string its = resolved(saves.back()).filename().string();
    if (latest.empty() || its >= name) {
      latest = saves.back();
      name = its;
    }
  }
  if (latest.empty())
    fail(folders.front(), "holds no save, that is no folder named by date and time with a manifest.json");
  return latest;
}

Save read_save(const Path& folder) {
  const Path path = folder / kManifest;
  check_plain(folder, kManifest);
  const std::string text = read_all(path);
  try {
    const Json body = Json::parse(text);
    if (body["format"].string() != "rec_sdk_torch checkpoint")
      throw std::invalid_argument("of another program");
    const int64_t version = body["version"].integer();
    if (version < 1 || version > kLastVersion) {
      fail(path, "of format version " + std::to_string(version) + ", this one reads up to " +
                     std::to_string(kLastVersion));
    }
    if (!is_right(text)) fail(path, "damaged, its checksum is wrong");
    return parse_save(folder, body);
  } catch (const std::invalid_argument& error) {
    fail(path, std::string("damaged: ") + error.what());
  }
}

std::vector<Save> chain_of(const Path& save, const std::vector<std::string>& folders) {
  std::vector<Save> chain{read_save(save)};
  std::vector<Path> roots{resolved(save).parent_path()};
  for (const std::string& each : folders) {
    const Path folder = resolved(each);
    roots.push_back(fs::exists(folder / kManifest) ? folder.parent_path() : folder);
  }
  const auto find = [&](const Save& later) {
    const Path home = resolved(later.folder).parent_path();
    for (const std::string& each : later.folders) roots.push_back((home / each).lexically_normal());
    for (const Path& root : roots) {
      std::vector<Save> found;
      std::error_code error;
      if (!fs::is_directory(root, error)) continue;
      for (const Path& folder : saves_in(root)) {
        try {
          Save one = read_save(folder);
          if (one.id == later.previous) found.push_back(std::move(one));
        } catch (const SaveError&) {  // not the one, as far as can be told
        }
      }
      if (found.size() > 1)
        fail(found[1].folder, "the same save as " + found[0].folder.string() + ": remove one");
      if (!found.empty()) return found[0];
    }
    fail(later.folder, "a delta of the save " + later.previous + ", which is not there, or damaged");
  };
  while (!chain.back().previous.empty()) {
    Save before = find(chain.back());
    if (before.base != chain[0].base || before.sequence + 1 != chain.back().sequence) {
      fail(chain.back().folder, "it cannot follow " + before.folder.string());
    }
    chain.push_back(std::move(before));
  }
  return chain;
}

Tensors open_tensors(const Save& save, const SavedFile& file, const SavedTable& table, int64_t row_bytes) {
  check_plain(save.folder, file.path);
  const Path path = save.folder / file.path;
  std::ifstream in(path, std::ios::binary);
  const auto size = static_cast<int64_t>(fs::file_size(path));
  if (file.packed ? size < file.bytes || size - file.bytes < file.offset : size != file.bytes) {
    fail(path, "damaged, it has " + std::to_string(size) + " bytes");
  }
  std::string header(8, '\0');
  in.seekg(file.offset);
  in.read(header.data(), 8);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(header[static_cast<size_t>(i)]);
  if (!in || length > static_cast<uint64_t>(std::min(kMostHeader, file.bytes - 8)))
    fail(path, "damaged, its header");
  header.resize(8 + length);
  in.read(header.data() + 8, static_cast<std::streamsize>(length));
  if (!in || crc32(header.data(), header.size()) != file.header_checksum) {
    fail(path, "damaged, the checksum of its header is wrong");
  }
  try {
    const Json fields = Json::parse(header.substr(8));
    if (fields["__metadata__"]["save"].string() != save.id ||
        fields["__metadata__"]["table"].string() != file.table) {
      throw std::invalid_argument("of another save or table");
    }
    const auto place = [&](const std::string& name, int64_t bytes) {
      const std::vector<Json>& ends = fields[name]["data_offsets"].list();
      if (ends.size() != 2 || ends[0].integer() < 0 ||
          ends[1].integer() - ends[0].integer() != saturated_product(file.rows, bytes) ||
          ends[1].integer() > file.bytes - static_cast<int64_t>(header.size())) {
        throw std::invalid_argument(name + " has not the bytes of " + std::to_string(file.rows) +
                                    " rows of table " + table.key);
      }
      return file.offset + static_cast<int64_t>(header.size()) + ends[0].integer();
    };
    return {path, place("ids", 8), file.role == "rows" ? place("weight", row_bytes) : -1};
  } catch (const std::invalid_argument& error) {
    fail(path, std::string("damaged: ") + error.what());
  }
}

}  // namespace rec_sdk
