#include "distckpt/storage/source_tree.h"

#include <algorithm>

#include "distckpt/base/threads.h"
#include "distckpt/storage/remote_tree.h"

namespace ferry::distckpt {
namespace fs = std::filesystem;

bool source_exists(const fs::path& path) {
  if (!is_remote(path)) return fs::exists(path);
  auto& tree = RemoteTree::instance();
  return tree.is_file(path) || tree.is_folder(path);
}

bool source_is_file(const fs::path& path) {
  return is_remote(path) ? RemoteTree::instance().is_file(path) : fs::is_regular_file(path);
}

bool source_is_folder(const fs::path& path) {
  return is_remote(path) ? RemoteTree::instance().is_folder(path) : fs::is_directory(path);
}

std::vector<fs::path> list_source(const fs::path& folder) {
  if (is_remote(folder)) return RemoteTree::instance().list(folder);
  std::vector<fs::path> found;
  if (!fs::is_directory(folder)) return found;
  for (const auto& entry : fs::directory_iterator(folder)) found.push_back(entry.path());
  return found;
}

std::vector<fs::path> list_source_below(const fs::path& folder) {
  return RemoteTree::instance().list_below(folder);
}

fs::path canonical_source(const fs::path& path) {
  return is_remote(path) ? path : fs::weakly_canonical(path);
}

void open_sources(const std::vector<fs::path>& paths) {
  std::vector<fs::path> remote;
  for (const auto& path : paths) {
    if (is_remote(path)) remote.push_back(path);
  }
  if (remote.size() > 1) RemoteTree::instance().open_all(remote);
}

int reading_threads(int threads, const fs::path& path) {
  constexpr int kRequests = 16;  // at a time
  if (threads > 0 || !is_remote(path)) return threads;
  return std::max(kRequests, available_cores());
}

}  // namespace ferry::distckpt
