#include "distckpt/work_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>
#include <ranges>
#include <system_error>
#include <utility>

#include "distckpt/error.h"
#include "distckpt/filenames.h"

namespace ferry::distckpt {
namespace fs = std::filesystem;
namespace {

// Creates the folder and its missing parents; those it made, outermost first.
std::vector<fs::path> make_folders(const fs::path& path) {
  std::vector<fs::path> missing;
  for (fs::path at = path; !at.empty() && !fs::exists(at); at = at.parent_path()) {
    missing.insert(missing.begin(), at);
  }
  for (const auto& folder : missing) {
    std::error_code error;
    fs::create_directory(folder, error);
    require(!error || fs::is_directory(folder), ErrorKind::kIo, "{}: cannot be created: {}",
            folder.string(), error.message());
  }
  return missing;
}

void remove_tree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  require(!error, ErrorKind::kIo, "{}: cannot be removed: {}", path.string(), error.message());
}

// Locks the folder at `path`; an empty descriptor if another run holds it.
Descriptor lock_folder(const fs::path& path) {
  while (true) {
    Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    require(static_cast<bool>(folder), ErrorKind::kIo, "{}: cannot be opened: {}", path.string(),
            system_error_text(errno));
    if (::flock(folder.get(), LOCK_EX | LOCK_NB) != 0) return Descriptor();
    // Another run may have removed the folder between open and lock.
    struct stat locked {};
    struct stat there {};
    if (::fstat(folder.get(), &locked) == 0 && ::stat(path.c_str(), &there) == 0 &&
        locked.st_ino == there.st_ino && locked.st_dev == there.st_dev) {
      return folder;
    }
    make_folders(path);
  }
}

// The folder that `path` lies in, also for a path of one name.
fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

// What tells a folder from every other, and stays the same when it is renamed.
std::string identity(const fs::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return {};
  return fmt::format("{} {}\n", status.st_dev, status.st_ino);
}

int rename_with_flags(const fs::path& from, const fs::path& to, unsigned flags) {
  return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
}

}  // namespace

WorkFolder::WorkFolder(fs::path target, bool resume)
    : target_(target.has_filename() ? std::move(target) : target.parent_path()),  // "out/" is "out"
      path_(work_folder(target_)) {
  made_parents_ = make_folders(path_.parent_path());
  make_folders(path_);
  lock_ = lock_folder(path_);
  if (!lock_) {
    keep_ = true;  // it is the other run's
    throw Error(ErrorKind::kUsage, fmt::format("{}: another run is writing it", target_.string()),
                "wait for it to end");
  }
  if (!resume) {
    for (const auto& left : fs::directory_iterator(path_)) remove_tree(left.path());
  }
  make_folders(output());
}

WorkFolder::~WorkFolder() {
  if (keep_) return;
  std::error_code ignored;  // a destructor has nobody to tell
  // The mark of publication goes last: until then an interrupted run is known to have published.
  std::vector<fs::path> left;
  for (const auto& entry : fs::directory_iterator(path_, ignored)) left.push_back(entry.path());
  for (const auto& path : left) {
    if (path.filename() != kPublishing) fs::remove_all(path, ignored);
  }
  fs::remove_all(path_, ignored);
  for (const auto& parent : std::ranges::reverse_view(made_parents_)) fs::remove(parent, ignored);
}

bool WorkFolder::published_earlier(const fs::path& target) {
  const auto mark = work_folder(target) / kPublishing;
  return fs::exists(mark) && fs::exists(target) && read_text(mark) == identity(target);
}

fs::path WorkFolder::output() const {
  return path_ / kWorkOutput;
}
fs::path WorkFolder::journal() const {
  return path_ / kJournal;
}

void WorkFolder::publish(bool overwrite) {
  for (const auto& entry : fs::recursive_directory_iterator(output())) {
    if (entry.is_directory()) sync_directory(entry.path());
  }
  sync_directory(output());
  write_text(path_ / kPublishing, identity(output()));
  sync_directory(path_);
  const bool occupied =
      fs::exists(target_) && !(fs::is_directory(target_) && fs::is_empty(target_));
  if (!occupied) {
    const int error = rename_with_flags(output(), target_, 0);
    require(error == 0, ErrorKind::kIo, "{}: cannot be put in place: {}", target_.string(),
            system_error_text(error));
  } else {
    require(overwrite, ErrorKind::kUsage, "{}: exists already", target_.string());
    int error = rename_with_flags(output(), target_, RENAME_EXCHANGE);
    if (error == EINVAL || error == ENOSYS) {
      // This file system cannot exchange: for a moment there is no target, and never a half one.
      error = rename_with_flags(target_, path_ / "replaced", 0);
      if (error == 0) {
        error = rename_with_flags(output(), target_, 0);
        if (error != 0) rename_with_flags(path_ / "replaced", target_, 0);
      }
    }
    require(error == 0, ErrorKind::kIo, "{}: cannot be replaced: {}", target_.string(),
            system_error_text(error));
  }
  sync_directory(folder_of(target_));
  made_parents_.clear();
}

void replace_text(const fs::path& path, std::string_view text) {
  auto temporary = path;
  temporary += ".ferry-tmp";
  write_text(temporary, text);
  const int error = rename_with_flags(temporary, path, 0);
  require(error == 0, ErrorKind::kIo, "{}: cannot be replaced: {}", path.string(),
          system_error_text(error));
  sync_directory(folder_of(path));
}

}  // namespace ferry::distckpt
