#include "torch_npu_ext/serving/saves.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <set>
#include <tuple>

#include "torch_npu_ext/engine/base/memory.h"
#include "torch_npu_ext/engine/store/serving.h"
#include "torch_npu_ext/serving/include/rec_sdk/table_reader.h"
#include "torch_npu_ext/serving/json.h"

namespace rec_sdk {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLastVersion = 5;
constexpr int64_t kMostHeader = 1 << 20;

// Returns the CRC-32 of IEEE 802.3, as in zlib.
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

// Throws unless `inner` is the path of a regular file inside the folder of a save and contains no symbolic
// link.
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

// Returns whether the checksum in a manifest is correct for the manifest's text without the checksum line.
bool checksum_matches(const std::string& text) {
  const std::string before = "\n \"checksum\": ", behind = "\n \"created\": ";
  const size_t begin = text.find(before);
  if (begin == std::string::npos) return false;
  const size_t comma = text.find(',', begin);
  if (comma == std::string::npos || text.compare(comma + 1, behind.size(), behind) != 0) return false;
  const std::string digits = text.substr(begin + before.size(), comma - begin - before.size());
  const uint32_t sum = crc32(text.data() + comma + 1, text.size() - comma - 1, crc32(text.data(), begin));
  return digits == std::to_string(sum);
}

bool consists_of(const std::string& text, const char* characters) {
  return text.find_first_not_of(characters) == std::string::npos;
}

constexpr char kDigits[] = "0123456789";
constexpr char kHexadecimal[] = "0123456789abcdef";
constexpr char kLetters[] = "0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

std::string checked_id(const std::string& id) {
  if (id.size() != 32 || !consists_of(id, kHexadecimal)) {
    throw std::invalid_argument("the id " + id);
  }
  return id;
}

// Returns whether `key` can be the key of a table called `name`: the name, or if several tables have this
// name, the name with a dot and a number.
bool is_key(const std::string& key, const std::string& name) {
  if (name.empty() || !consists_of(name, kLetters)) return false;
  if (key == name) return true;
  const size_t number = name.size() + 1;
  return key.size() > number && key.compare(0, number, name + ".") == 0 && key[number] != '0' &&
         consists_of(key.substr(number), kDigits);
}

// Returns whether a path is printable ASCII and stays inside its folder: no part between slashes is empty,
// "." or "..".
bool is_inner_path(const std::string& path) {
  if (!std::all_of(path.begin(), path.end(), [](char c) { return c >= ' ' && c <= '~'; })) return false;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = path.find('/', begin);
    const std::string part = path.substr(begin, end == std::string::npos ? end : end - begin);
    if (part.empty() || part == "." || part == "..") return false;
  }
  return true;
}

SavedTable parse_table(const Json& t) {
  const SavedTable table{t["key"].string(),          t["name"].string(),           t["module"].string(),
                         t["weight_dtype"].string(), t["embedding_dim"].integer(), t["rows"].integer(),
                         t["hashed"].boolean()};
  if (!is_key(table.key, table.name)) throw std::invalid_argument("a table has the key " + table.key);
  if (table.dim < 1 || table.dim > INT32_MAX || table.rows < 0) {
    throw std::invalid_argument("sizes of " + table.key);
  }
  row_format(table.weight_type);
  return table;
}

SavedFile parse_file(const Json& f) {
  const bool packed = f.has("offset");
  SavedFile file{f["path"].string(),
                 f["role"].string(),
                 f["table"].string(),
                 f["rank"].integer(),
                 f["layer"].integer(),
                 f["rows"].integer(),
                 f["bytes"].integer(),
                 packed ? f["offset"].integer() : 0,
                 f["checksums"]["header"].integer(),
                 packed};
  if (!is_inner_path(file.path)) throw std::invalid_argument("a file has the path " + file.path);
  if (file.rank < 0 || file.layer < 0 || file.rows < 0 || file.bytes < 8 || file.offset < 0) {
    throw std::invalid_argument("sizes of " + file.path);
  }
  return file;
}

// Returns whether the file determines which ids have rows.
bool has_ids(const SavedFile& file) { return file.role == "removed" || file.role == "rows"; }

// Checks that no byte belongs to two files, which bounds the amount of data that is read by the size of the
// save.
void check_no_overlap(const std::vector<SavedFile>& files) {
  std::vector<const SavedFile*> ordered;
  for (const SavedFile& file : files) ordered.push_back(&file);
  std::sort(ordered.begin(), ordered.end(), [](const SavedFile* a, const SavedFile* b) {
    return std::tie(a->path, a->offset) < std::tie(b->path, b->offset);
  });
  for (size_t i = 1; i < ordered.size(); ++i) {
    const SavedFile &file = *ordered[i - 1], &next = *ordered[i];
    if (file.path == next.path && next.offset - file.offset < file.bytes) {
      throw std::invalid_argument(file.path + " has files that share bytes");
    }
  }
}

// Returns those files that contain rows or removed ids of the tables.
std::vector<SavedFile> relevant(std::vector<SavedFile> files, const std::vector<SavedTable>& tables) {
  const auto is_relevant = [&](const SavedFile& file) {
    return has_ids(file) && std::any_of(tables.begin(), tables.end(),
                                        [&](const SavedTable& t) { return t.key == file.table; });
  };
  files.erase(std::partition(files.begin(), files.end(), is_relevant), files.end());
  return files;
}

// Returns the offset of a tensor from the end of its file's header. `end` is the number of bytes after the
// header.
int64_t tensor_offset(const Json& header, const std::string& name, const std::string& dtype,
                      const std::vector<int64_t>& shape, int64_t row_bytes, int64_t end) {
  const Json& tensor = header[name];
  std::vector<int64_t> numbers[2];
  for (const Json& each : tensor["shape"].list()) numbers[0].push_back(each.integer());
  for (const Json& each : tensor["data_offsets"].list()) numbers[1].push_back(each.integer());
  const auto& [own, ends] = numbers;
  if (tensor["dtype"].string() != dtype || own != shape) {
    throw std::invalid_argument(name + " is no tensor " + dtype + " of " + std::to_string(shape[0]) +
                                " rows" + (shape.size() > 1 ? " of " + std::to_string(shape[1]) : ""));
  }
  if (ends.size() != 2 || ends[0] < 0 || ends[1] < ends[0] || ends[1] > end ||
      ends[1] - ends[0] != saturated_product(shape[0], row_bytes)) {
    throw std::invalid_argument(name + " has not the bytes of " + std::to_string(shape[0]) + " rows");
  }
  return ends[0];
}

void check_rows(const Save& save) {
  for (const SavedTable& table : save.tables) {
    int64_t rows = 0;
    for (const SavedFile& file : save.files) {
      if (file.rows > UINT32_MAX) throw std::invalid_argument("sizes of " + file.path);
      if (file.table == table.key && file.role == "rows") rows += file.rows;
    }
    if (save.sequence == 0 && rows < table.rows) {
      throw std::invalid_argument("table " + table.key + " has " + std::to_string(table.rows) +
                                  " rows, its files only " + std::to_string(rows));
    }
  }
}

Save parse_save(const Path& folder, const Json& body, const std::string& wanted) {
  Save save;
  save.folder = folder;
  save.id = checked_id(body["id"].string());
  save.base = checked_id(body["base"].string());
  if (!body["previous"].is_null()) save.previous = checked_id(body["previous"].string());
  save.sequence = body["sequence"].integer();
  const bool full = body["kind"].string() == "full";
  if ((!full && body["kind"].string() != "delta") || save.sequence < 0 || full != save.previous.empty() ||
      full != (save.base == save.id) || full != (save.sequence == 0)) {
    throw std::invalid_argument("a " + body["kind"].string() + " save, number " +
                                std::to_string(save.sequence) + " of the chain " + save.base +
                                (save.previous.empty() ? "" : " after " + save.previous));
  }
  if (body.has("folders")) {
    for (const Json& each : body["folders"].list()) save.folders.push_back(each.string());
  }
  std::set<std::string> keys;
  const std::string name = wanted.substr(0, wanted.find('.'));
  for (const Json& each : body["tables"].list()) {
    SavedTable table = parse_table(each);
    if (!keys.insert(table.key).second) throw std::invalid_argument("table " + table.key + " twice");
    if (table.name == name) save.tables.push_back(std::move(table));
  }
  for (const Json& each : body["files"].list()) {
    save.files.push_back(parse_file(each));
    const SavedFile& file = save.files.back();
    if (has_ids(file) && keys.count(file.table) == 0) {
      throw std::invalid_argument(file.path + " is of a table " + file.table);
    }
  }
  check_no_overlap(save.files);
  save.files = relevant(std::move(save.files), save.tables);
  check_rows(save);
  return save;
}

}  // namespace

void fail(const Path& path, const std::string& what) { throw SaveError(path.string() + ": " + what); }

std::vector<SavedFile> Save::files_of(const std::string& key) const {
  std::vector<SavedFile> found;
  for (const SavedFile& file : files) {
    if (file.table == key) found.push_back(file);
  }
  const auto order = [](const SavedFile& f) {
    return std::make_tuple(f.layer, f.role == "rows", f.rank, f.path);
  };
  std::stable_sort(found.begin(), found.end(),
                   [&](const SavedFile& a, const SavedFile& b) { return order(a) < order(b); });
  return found;
}

Save read_save(const Path& folder, const std::string& table) {
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
    if (!checksum_matches(text)) fail(path, "damaged, its checksum is wrong");
    return parse_save(folder, body, table);
  } catch (const std::invalid_argument& error) {
    fail(path, std::string("damaged: ") + error.what());
  }
}

Tensors open_tensors(const Save& save, const SavedFile& file, const SavedTable& table) {
  check_plain(save.folder, file.path);
  const Path path = save.folder / file.path;
  std::ifstream in(path, std::ios::binary);
  std::error_code error;
  const auto size = static_cast<int64_t>(fs::file_size(path, error));
  if (error) fail(path, error.message());
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
    const int64_t begin = file.offset + static_cast<int64_t>(header.size());
    const int64_t end = file.bytes - static_cast<int64_t>(header.size());
    const auto ids = begin + tensor_offset(fields, "ids", "I64", {file.rows}, 8, end);
    if (file.role == "removed") return {path, ids, -1};
    const RowFormat format = row_format(table.weight_type);
    const int64_t bytes = row_bytes(format, table.dim);
    const bool quantized = format == RowFormat::kInt8 || format == RowFormat::kInt4;
    return {path, ids,
            begin + tensor_offset(fields, "weight", quantized ? "U8" : table.weight_type,
                                  {file.rows, quantized ? bytes : table.dim}, bytes, end)};
  } catch (const std::invalid_argument& error) {
    fail(path, std::string("damaged: ") + error.what());
  }
}

}  // namespace rec_sdk
