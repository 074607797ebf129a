#include "distckpt/storage/source_files.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/remote_tree.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::distckpt {
namespace {

// Readers of formats open files at many depths; none of them has to know who wants to hear of it.
thread_local SourceFiles* noted = nullptr;

void require_equal(const std::filesystem::path& path,
                   const FileIdentity& before,
                   const FileIdentity& now) {
  if (before == now) return;
  const bool replaced = before.device != now.device || before.inode != now.inode;
  throw Error(ErrorKind::kIo,
              fmt::format("{}: was {} while it was read", path.string(),
                          replaced ? "replaced by another file" : "changed by someone else"),
              "let nobody write to the source, and run the same command again");
}

// `git clone` without git-lfs leaves a pointer of some 130 bytes in the place of each large file:
// git-lfs.com/spec/v1.
void refuse_pointer(const ReadFile& file) {
  constexpr std::string_view kBegin = "version https://git-lfs";
  constexpr std::int64_t kEnd = 1024;  // a pointer is smaller
  if (file.size() < std::ssize(kBegin) || file.size() >= kEnd) return;
  std::string begin(kBegin.size(), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(begin)));
  if (begin != kBegin) return;
  throw Error(ErrorKind::kCorrupt,
              fmt::format("{}: is a pointer of git-lfs, not the file itself", file.path().string()),
              "git lfs pull, in the folder that was cloned, fetches the files");
}

}  // namespace

void SourceFiles::add(const ReadFile& file) {
  const auto [at, added] = files_.emplace(file.path(), file.identity());
  if (!added) return require_equal(file.path(), at->second, file.identity());
  refuse_pointer(file);
}

void SourceFiles::require_same(const ReadFile& file) const {
  const auto found = files_.find(file.path());
  if (found != files_.end()) require_equal(file.path(), found->second, file.identity());
}

void SourceFiles::require_unchanged() const {
  RemoteTree::instance().forget();
  std::vector<std::filesystem::path> paths;
  for (const auto& [path, _] : files_) paths.push_back(path);
  open_sources(paths);
  for (const auto& [path, identity] : files_) require_equal(path, identity, identity_of(path));
}

void SourceFiles::settle() const {
  std::int64_t last = 0;
  for (const auto& [path, identity] : files_) last = std::max(last, identity.changed_ns);
  // The clock that changes are stamped with. A server's may be ahead of it, and says nothing.
  for (int i = 0; i < 20; ++i) {
    struct timespec now {};
    if (::clock_gettime(CLOCK_REALTIME_COARSE, &now) != 0) return;
    if (now.tv_sec * 1'000'000'000 + now.tv_nsec > last) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void SourceFiles::note(const ReadFile& file) {
  if (noted != nullptr) noted->add(file);
}

NotedFiles::NotedFiles(SourceFiles& files) : before_(std::exchange(noted, &files)) {}

NotedFiles::~NotedFiles() {
  noted = before_;
}

}  // namespace ferry::distckpt
