#include "torch_npu_ext/serving/save_folders.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "torch_npu_ext/serving/include/rec_sdk/table_reader.h"

namespace rec_sdk {
namespace {

namespace fs = std::filesystem;

// Returns whether a name is a name of saves: date and time in 14 digits, optionally with a dot and
// microseconds.
bool is_name(const std::string& name) {
  const auto digits = [&](size_t begin, size_t count) {
    return name.find_first_not_of("0123456789", begin) >= begin + count;
  };
  const bool plain = name.size() == 14, fine = name.size() == 21 && name[14] == '.' && digits(15, 6);
  if (!digits(0, 14) || !(plain || fine)) return false;
  const auto number = [&](size_t begin, size_t count) { return std::stoi(name.substr(begin, count)); };
  const int year = number(0, 4), month = number(4, 2), day = number(6, 2);
  const bool leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
  const int days[] = {31, leap ? 29 : 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
  return year > 0 && month >= 1 && month <= 12 && day >= 1 && day <= days[month - 1] && number(8, 2) < 24 &&
         number(10, 2) < 60 && number(12, 2) < 60;
}

bool is_save(const Path& folder) {
  std::error_code error;
  return fs::exists(folder / kManifest, error);
}

std::vector<Path> saves_in(const Path& folder) {
  if (is_save(folder)) return {folder};
  std::vector<Path> found;
  std::error_code error;
  fs::directory_iterator all(folder, error);
  if (error) fail(folder, "there is no such folder, or it cannot be read");
  for (const fs::directory_entry& each : all) {
    if (is_name(each.path().filename().string()) && is_save(each.path())) found.push_back(each.path());
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

void add_once(std::vector<Path>& roots, const Path& root) {
  if (std::find(roots.begin(), roots.end(), root) == roots.end()) roots.push_back(root);
}

}  // namespace

Path SaveArchive::latest() const {
  Path latest;
  std::string name;
  for (const std::string& each : folders_) {
    const std::vector<Path> saves = saves_in(each);
    if (saves.empty()) continue;
    const std::string its = resolved(saves.back()).filename().string();
    if (latest.empty() || its >= name) {
      latest = saves.back();
      name = its;
    }
  }
  if (latest.empty())
    fail(folders_.front(), "holds no save, that is no folder named by date and time with a manifest.json");
  return latest;
}

Chain SaveArchive::chain(const Path& save) {
  std::map<Path, Known> read_now;
  Chain chain{read(save, read_now)};
  std::vector<Path> roots{resolved(save).parent_path()};
  for (const std::string& each : folders_) {
    const Path folder = resolved(each);
    add_once(roots, is_save(folder) ? folder.parent_path() : folder);
  }
  std::map<Path, SavesById> of_roots;
  const auto find = [&](const Save& later) {
    const Path home = resolved(later.folder).parent_path();
    for (const std::string& each : later.folders) add_once(roots, (home / each).lexically_normal());
    for (const Path& root : roots) {
      auto saves = of_roots.find(root);
      if (saves == of_roots.end()) saves = of_roots.emplace(root, read_all(root, read_now)).first;
      const auto [first, last] = saves->second.equal_range(later.previous);
      if (first == last) continue;
      if (std::next(first) != last) {
        fail(std::next(first)->second->folder,
             "the same save as " + first->second->folder.string() + ": remove one");
      }
      return first->second;
    }
    fail(later.folder, "a delta of the save " + later.previous + ", which is not there, or damaged");
  };
  while (!chain.back()->previous.empty()) {
    std::shared_ptr<const Save> before = find(*chain.back());
    if (before->base != chain[0]->base || before->sequence != chain.back()->sequence - 1) {
      fail(chain.back()->folder, "it cannot follow " + before->folder.string());
    }
    chain.push_back(std::move(before));
  }
  known_ = std::move(read_now);
  return chain;
}

SaveArchive::Stamp SaveArchive::stamp_of(const Path& save) {
  const Path manifest = save / kManifest;
  struct stat about;
  if (stat(manifest.c_str(), &about) != 0) fail(manifest, std::strerror(errno));
  return {about.st_dev, about.st_ino, about.st_size, about.st_mtim.tv_sec, about.st_mtim.tv_nsec};
}

// Returns the save in a folder. `read_now`: saves whose manifests the present call of chain() has already
// read or found unchanged.
std::shared_ptr<const Save> SaveArchive::read(const Path& folder, std::map<Path, Known>& read_now) const {
  const Path place = resolved(folder);
  const auto now = read_now.find(place);
  if (now != read_now.end()) return now->second.save;
  const Stamp stamp = stamp_of(folder);
  const auto known = known_.find(place);
  std::shared_ptr<const Save> save = known != known_.end() && known->second.stamp == stamp
                                         ? known->second.save
                                         : std::make_shared<const Save>(read_save(folder, table_));
  read_now[place] = {stamp, save};
  return save;
}

SaveArchive::SavesById SaveArchive::read_all(const Path& root, std::map<Path, Known>& read_now) const {
  SavesById found;
  std::error_code error;
  if (!fs::is_directory(root, error)) return found;
  for (const Path& folder : saves_in(root)) {
    try {
      std::shared_ptr<const Save> save = read(folder, read_now);
      found.emplace(save->id, std::move(save));
    } catch (const SaveError&) {  // a damaged save is skipped
    }
  }
  return found;
}

}  // namespace rec_sdk
