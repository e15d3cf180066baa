#include "torch_npu_ext/serving/include/rec_sdk/table_reader.h"

#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <utility>

#include "torch_npu_ext/engine/base/errors.h"
#include "torch_npu_ext/engine/store/index_file.h"
#include "torch_npu_ext/engine/store/serving.h"
#include "torch_npu_ext/serving/save_folders.h"
#include "torch_npu_ext/serving/saves.h"

namespace rec_sdk {
namespace {

constexpr int64_t kPiece = 1 << 16;  // number of ids that are read at a time while an index is built

namespace fs = std::filesystem;

// Returns f(), and converts exceptions of the engine and the file system to SaveError.
template <class F>
auto with_save_errors(const F& f) {
  try {
    return f();
  } catch (const DiskError& error) {
    throw SaveError(error.path() + ": " + error.what() + ": " + std::strerror(error.error()));
  } catch (const fs::filesystem_error& error) {
    fail(error.path1(), error.code().message());
  } catch (const std::invalid_argument& error) {
    throw SaveError(error.what());
  }
}

// A new temporary folder with a random name, which the destructor removes.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::error_code error;
    const Path place = fs::temp_directory_path(error);
    if (error) fail(place, "no folder for the index of a save that has none (TMPDIR): " + error.message());
    std::string name = (place / "rec_sdk-index-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) {
      fail(place, std::string("an index of a save cannot be made there (TMPDIR): ") + std::strerror(errno));
    }
    path_ = name;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const Path& path() const { return path_; }

 private:
  Path path_;
};

const SavedTable& table_of(const Save& save, const std::string& name) {
  std::vector<const SavedTable*> found;
  for (const SavedTable& table : save.tables) {
    if (table.key == name) return table;
    if (table.name == name) found.push_back(&table);
  }
  if (found.size() != 1) throw SaveError(save.folder.string() + ": no table " + name);
  return *found[0];
}

// Returns the table that corresponds to `wanted` in another save of its chain.
const SavedTable& same_table(const Save& save, const SavedTable& wanted) {
  const SavedTable* by_name = nullptr;
  int count = 0;
  for (const SavedTable& table : save.tables) {
    if (table.name != wanted.name) continue;
    if (table.module == wanted.module) {
      by_name = &table;
      count = 1;
      break;
    }
    by_name = &table;
    ++count;
  }
  if (count != 1) throw SaveError(save.folder.string() + ": no table " + wanted.key);
  if (by_name->dim != wanted.dim || by_name->weight_type != wanted.weight_type ||
      by_name->hashed != wanted.hashed) {
    throw SaveError(save.folder.string() + ": table " + by_name->key +
                    " is another than in a save that follows");
  }
  return *by_name;
}

void add_ids(IndexWriter& writer, const Tensors& from, const SavedFile& file, uint32_t number) {
  std::ifstream in(from.path, std::ios::binary);
  in.seekg(from.ids);
  std::vector<int64_t> ids(static_cast<size_t>(std::min(kPiece, file.rows)));
  for (int64_t begin = 0; begin < file.rows; begin += kPiece) {
    const int64_t count = std::min(kPiece, file.rows - begin);
    in.read(reinterpret_cast<char*>(ids.data()), count * 8);
    if (!in) throw SaveError(from.path.string() + ": damaged, it ends too early");
    if (file.role == "rows") {
      writer.add(ids.data(), count, number, static_cast<uint32_t>(begin));
    } else {
      writer.remove(ids.data(), count);
    }
  }
}

// Writes a table's index, which maps ids to rows, to a new file.
void write_index(const Path& path, const Save& save,
                 const std::vector<std::pair<SavedFile, Tensors>>& files) {
  int64_t most = 0;
  for (const auto& [file, place] : files) most += file.rows;
  IndexWriter writer(path.string(), most, save.id);
  for (uint64_t round = 0; round < writer.rounds(); ++round) {
    uint32_t number = 0;
    for (const auto& [file, place] : files) {
      add_ids(writer, place, file, number);
      number += file.role == "rows";
    }
    writer.end_round();
  }
  writer.finish(false);  // needs no fsync, because the file is deleted with the reader
}

// Returns a table's files and index in one save. If the save has no index, an index is built in a new
// temporary folder, which `temporary` owns.
ServedSave served_save(const Save& save, const SavedTable& table,
                       std::vector<std::unique_ptr<TemporaryFolder>>& temporary) {
  std::vector<std::pair<SavedFile, Tensors>> files;
  ServedSave served{"", save.id, {}};
  for (const SavedFile& file : save.files_of(table.key)) {
    const Tensors place = open_tensors(save, file, table);
    files.emplace_back(file, place);
    if (file.role == "rows") served.files.push_back({place.path.string(), place.weight, file.rows});
  }
  for (const char* const name : {"index2-", "index-"}) {  // of the present format, and of version 0.2.0
    served.index = (save.folder / (name + table.key)).string();
    std::error_code error;
    const auto kind = fs::symlink_status(served.index, error).type();
    if (kind == fs::file_type::regular) return served;
    if (kind != fs::file_type::not_found) throw SaveError(served.index + ": no plain file");
  }
  temporary.push_back(std::make_unique<TemporaryFolder>());
  served.index = (temporary.back()->path() / "index").string();
  write_index(served.index, save, files);
  return served;
}

struct Moment {
  Path save;
  SavedTable about;
  std::unique_ptr<ServedTable> table;
};

std::shared_ptr<const Moment> open_moment(const Path& latest, SaveArchive& archive, const std::string& name) {
  const Chain chain = archive.chain(latest);
  const SavedTable about = table_of(*chain[0], name);
  const RowFormat format = row_format(about.weight_type);
  std::vector<ServedSave> saves;
  std::vector<std::unique_ptr<TemporaryFolder>> temporary;
  for (const std::shared_ptr<const Save>& save : chain) {
    saves.push_back(served_save(*save, same_table(*save, about), temporary));
  }
  auto moment = std::make_shared<Moment>();
  moment->save = latest;
  moment->about = about;
  moment->table = std::make_unique<ServedTable>(saves, format, about.dim);
  return moment;
}

}  // namespace

struct TableReader::State {
  State(std::vector<std::string> folders, std::string table, float value)
      : archive(std::move(folders), table), name(std::move(table)), missing(value) {}

  SaveArchive archive;
  std::string name;
  float missing;
  mutable std::mutex reading;
  std::mutex refreshing;
  std::shared_ptr<const Moment> now;

  std::shared_ptr<const Moment> moment() const {
    const std::lock_guard<std::mutex> guard(reading);
    return now;
  }
};

TableReader::TableReader(std::vector<std::string> folders, std::string table, float missing) {
  if (folders.empty())
    throw std::invalid_argument("folders is empty, expected a folder of saves, or several");
  state_ = std::make_unique<State>(std::move(folders), std::move(table), missing);
  with_save_errors(
      [&] { state_->now = open_moment(state_->archive.latest(), state_->archive, state_->name); });
}

TableReader::TableReader(const std::string& folder, std::string table, float missing)
    : TableReader(std::vector<std::string>{folder}, std::move(table), missing) {}

TableReader::~TableReader() = default;
TableReader::TableReader(TableReader&&) noexcept = default;
TableReader& TableReader::operator=(TableReader&&) noexcept = default;

bool TableReader::refresh() {
  const std::lock_guard<std::mutex> one(state_->refreshing);
  return with_save_errors([&] {
    const Path latest = state_->archive.latest();
    if (latest == state_->moment()->save) return false;
    std::shared_ptr<const Moment> next = open_moment(latest, state_->archive, state_->name);
    const std::lock_guard<std::mutex> guard(state_->reading);
    state_->now.swap(next);
    return true;
  });
}

std::string TableReader::save() const { return state_->moment()->save.string(); }
int64_t TableReader::dim() const { return state_->moment()->about.dim; }
int64_t TableReader::rows() const { return state_->moment()->about.rows; }
std::string TableReader::weight_type() const { return state_->moment()->about.weight_type; }

void TableReader::lookup(const int64_t* ids, int64_t count, float* out, bool* found) const {
  const std::shared_ptr<const Moment> moment = state_->moment();
  with_save_errors([&] { moment->table->lookup_floats(ids, count, state_->missing, out, found); });
}

void TableReader::lookup_pooled(const int64_t* ids, const int64_t* offsets, int64_t bags,
                                const float* weights, Pooling pooling, float* out) const {
  if (bags < 0 || offsets[0] != 0 || !std::is_sorted(offsets, offsets + bags + 1)) {
    throw std::invalid_argument("offsets must ascend from 0");
  }
  const std::shared_ptr<const Moment> moment = state_->moment();
  const BagLookups lookups{ids, offsets, bags, weights, pooling == Pooling::kMean};
  with_save_errors([&] { moment->table->lookup_pooled(lookups, state_->missing, out); });
}

}  // namespace rec_sdk
