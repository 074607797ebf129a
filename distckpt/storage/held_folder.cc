#include "distckpt/storage/held_folder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "distckpt/base/foreign_error.h"

namespace ferry::distckpt {
namespace fs = std::filesystem;
namespace {

// "/proc/self/fd/7" is not found in "/proc/self/fd/70".
std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (auto at = text.find(from); at != std::string::npos;) {
    const auto end = at + from.size();
    const bool longer = end < text.size() && text[end] >= '0' && text[end] <= '9';
    if (!longer) text.replace(at, from.size(), to);
    at = text.find(from, longer ? end : at + to.size());
  }
  return text;
}

void walk(int folder,
          const fs::path& above,
          const std::function<void(const fs::path&, const FolderEntry&)>& visit) {
  for (const auto& entry : list_folder(folder)) {
    visit(above / entry.name, entry);
    if (!entry.is_folder()) continue;
    if (const auto inner = open_folder(folder, entry.name))
      walk(inner->get(), above / entry.name, visit);
  }
}

}  // namespace

// The number is reserved by a file of no name and no bytes: nothing can lie below it.
HeldFolder::HeldFolder(fs::path shown)
    : shown_(std::move(shown)),
      fd_(::memfd_create("ferry", MFD_CLOEXEC)),
      path_(fmt::format("/proc/self/fd/{}", fd_.get())) {
  require(static_cast<bool>(fd_), ErrorKind::kIo, "{}: cannot be held: {}", shown_.string(),
          system_error_text(errno));
}

void HeldFolder::hold(const Descriptor& folder) {
  require(::dup3(folder.get(), fd_.get(), O_CLOEXEC) >= 0, ErrorKind::kIo, "{}: cannot be held: {}",
          shown_.string(), system_error_text(errno));
  struct stat held {};
  struct stat there {};
  const bool reached = ::fstat(fd_.get(), &held) == 0 && ::stat(path_.c_str(), &there) == 0 &&
                       held.st_dev == there.st_dev && held.st_ino == there.st_ino;
  require(reached, ErrorKind::kIo, "{}: cannot be reached through {}: is /proc mounted?",
          shown_.string(), path_.string());
}

Error HeldFolder::named(const std::exception& error) const {
  const auto original = as_error(error);
  const auto rename = [&](const std::string& text) {
    return replaced(text, path_.string(), shown_.string());
  };
  Error renamed(original.kind(), rename(original.what()), rename(original.hint()));
  for (const auto& frame : original.context()) renamed.add_context(rename(frame));
  return renamed;
}

std::optional<Descriptor> open_folder(int parent, const fs::path& name) {
  Descriptor folder(
      ::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (folder) return folder;
  require(errno == ENOENT || errno == ENOTDIR || errno == ELOOP, ErrorKind::kIo,
          "{}: cannot be opened: {}", name.string(), system_error_text(errno));
  return std::nullopt;
}

std::vector<FolderEntry> list_folder(int folder) {
  // A descriptor of its own: reading moves it.
  const int copy = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(copy < 0 ? nullptr : ::fdopendir(copy),
                                                   ::closedir);
  require(stream != nullptr, ErrorKind::kIo, "a folder cannot be listed: {}",
          system_error_text(errno));
  std::vector<FolderEntry> entries;
  while (const auto* found = ::readdir(stream.get())) {
    FolderEntry entry{.name = found->d_name};
    if (entry.name == "." || entry.name == "..") continue;
    if (::fstatat(folder, found->d_name, &entry.status, AT_SYMLINK_NOFOLLOW) == 0)
      entries.push_back(std::move(entry));
  }
  std::ranges::sort(entries, {}, &FolderEntry::name);
  return entries;
}

void walk_folder(int folder,
                 const std::function<void(const fs::path&, const FolderEntry&)>& visit) {
  walk(folder, {}, visit);
}

}  // namespace ferry::distckpt
