#include "distckpt/storage/published_modes.h"

#include <sys/stat.h>

#include <system_error>

#include "distckpt/storage/remote_store.h"
#include "distckpt/storage/source_files.h"

namespace ferry::distckpt {
namespace fs = std::filesystem;

void PublishedModes::narrow(const fs::path& path) {
  struct stat status {};
  if (is_remote(path) || ::stat(path.c_str(), &status) != 0) return;
  (S_ISDIR(status.st_mode) ? folder : file) &= status.st_mode;
}

void PublishedModes::narrow(const SourceFiles& files) {
  for (const auto& [path, identity] : files.files()) file &= identity.mode;
}

void PublishedModes::narrow_all(const fs::path& path) {
  narrow(path);
  if (is_remote(path)) return;
  std::error_code error;
  if (!fs::is_directory(path, error)) return narrow(fs::absolute(path).parent_path());
  fs::recursive_directory_iterator at(path, fs::directory_options::skip_permission_denied, error);
  for (; !error && at != fs::end(at); at.increment(error)) {
    std::error_code unknown;
    if (!at->is_directory(unknown)) {
      narrow(at->path());
    } else if (at->path().filename().string().starts_with('.')) {
      at.disable_recursion_pending();
    }
  }
}

unsigned PublishedModes::lone_file() const {
  auto mode = file;
  for (const unsigned others : {3U, 0U}) {  // the bits of the group, and of everybody
    if ((folder >> others & 01U) == 0) mode &= ~(07U << others);
  }
  return mode | S_IRUSR;
}

}  // namespace ferry::distckpt
