// A folder that is held open. Files below it are reached through its descriptor: whoever renames or
// exchanges folders on the way to it changes nothing of what is read and written there.
#pragma once

#include <dirent.h>
#include <sys/stat.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"

namespace ferry::distckpt {

class HeldFolder {
 public:
  // Holds nothing yet. `shown` is what messages call it.
  explicit HeldFolder(std::filesystem::path shown);

  // path() leads to that folder from now on.
  void hold(const Descriptor& folder);

  int fd() const { return fd_.get(); }

  // "/proc/self/fd/7": good for as long as this lives, also while it holds nothing yet.
  const std::filesystem::path& path() const { return path_; }
  const std::filesystem::path& shown() const { return shown_; }

  // Runs `body`; an Error or an error of the standard library's files that leaves it calls the
  // folder by its name.
  template <typename Body>
  decltype(auto) with_its_name(Body&& body) const {
    try {
      return body();
    } catch (const std::exception& error) {
      throw named(error);
    }
  }

 private:
  Error named(const std::exception& error) const;

  std::filesystem::path shown_;
  Descriptor fd_;
  std::filesystem::path path_;
};

// Opens a folder in another, or by its path if `parent` is AT_FDCWD; a symbolic link at its end is
// not followed. Nothing if it is not there, or is no folder.
std::optional<Descriptor> open_folder(int parent, const std::filesystem::path& name);

// An entry of a folder, symbolic links not followed.
struct FolderEntry {
  std::string name{};
  struct stat status {};

  bool is_folder() const { return S_ISDIR(status.st_mode); }
  bool is_file() const { return S_ISREG(status.st_mode); }
};
std::vector<FolderEntry> list_folder(int folder);  // sorted by name

// Every entry below a folder with its path relative to it, folders before what they hold.
void walk_folder(
    int folder,
    const std::function<void(const std::filesystem::path& path, const FolderEntry& entry)>& visit);

}  // namespace ferry::distckpt
