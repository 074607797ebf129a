#include "distckpt/storage/work_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <ranges>
#include <set>
#include <system_error>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/storage/filenames.h"

namespace ferry::distckpt {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kMarkText = "ferry-work-1\n";
constexpr unsigned kOthersMayWrite = 022;

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

struct stat status_of(int folder) {
  struct stat status {};
  require(::fstat(folder, &status) == 0, ErrorKind::kIo, "a folder cannot be examined: {}",
          system_error_text(errno));
  return status;
}

// The folder that `path` lies in, also for a path of one name.
fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

[[noreturn]] void refuse(const fs::path& what, std::string_view why) {
  throw Error(ErrorKind::kUsage,
              fmt::format("{}: {}, and so it is neither used nor removed", what.string(), why),
              "move it away, or choose another target");
}

// The user that a file system takes this one for: servers map users, root above all.
uid_t own_user(int folder) {
  const auto name = fmt::format("owner.{}{}", ::getpid(), kTemporarySuffix);
  const Descriptor probe(
      ::openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!probe) return ::geteuid();
  const auto user = status_of(probe.get()).st_uid;
  ::unlinkat(folder, name.c_str(), 0);
  return user;
}

// True for what lies at the top of a working folder.
bool is_own_name(std::string_view name) {
  constexpr std::array kNames{kWorkMark,   kWorkFiles, kWorkOutput, kPublishing,
                              kWorkDamage, kReplaced,  kWorkRanks};
  constexpr std::array kJournals{kJournal, kProofJournal, kRereadJournal};
  // A run that was killed left files that were about to be put in place.
  if (name.ends_with(kTemporarySuffix)) return true;
  return std::ranges::find(kNames, name) != kNames.end() ||
         std::ranges::any_of(kJournals, [&](std::string_view journal) {
           return name == journal || name.starts_with(fmt::format("{}.", journal));
         });
}

// Ours: this user's, closed to others, and either empty or marked. False if it is not marked yet.
bool check_owner(int folder, const fs::path& shown) {
  const auto status = status_of(folder);
  if (status.st_uid != ::geteuid() && status.st_uid != own_user(folder))
    refuse(shown, "belongs to another user");
  struct stat mark {};
  const bool marked =
      ::fstatat(folder, std::string(kWorkMark).c_str(), &mark, AT_SYMLINK_NOFOLLOW) == 0 &&
      S_ISREG(mark.st_mode) && mark.st_uid == status.st_uid;
  // Some file systems have no permissions: the mark was made with 0600.
  const bool has_modes = !marked || (mark.st_mode & kOthersMayWrite) == 0;
  if ((status.st_mode & kOthersMayWrite) != 0 && has_modes)
    refuse(shown, "can be written by other users");
  return marked;
}

std::set<fs::path> read_names(const fs::path& list) {
  std::set<fs::path> names;
  if (!fs::exists(list)) return names;
  const auto text = read_text(list);
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\0', at), text.size());
    names.insert(text.substr(at, end - at));
    at = end + 1;
  }
  return names;
}

// Removes what is below the folder: the files that `mine` takes, and folders that are empty then.
void remove_below(int folder,
                  const fs::path& above,
                  const std::function<bool(const fs::path&)>& mine) {
  struct stat status = status_of(folder);
  if ((status.st_mode & S_IRWXU) != S_IRWXU) ::fchmod(folder, (status.st_mode | S_IRWXU) & 07777U);
  for (const auto& entry : list_folder(folder)) {
    const auto path = above / entry.name;
    if (!entry.is_folder()) {
      if (mine(path)) ::unlinkat(folder, entry.name.c_str(), 0);
      continue;
    }
    if (const auto inner = open_folder(folder, entry.name)) remove_below(inner->get(), path, mine);
    ::unlinkat(folder, entry.name.c_str(), AT_REMOVEDIR);
  }
}

int rename_between(
    int from, const fs::path& old_name, int to, const fs::path& name, unsigned flags) {
  return ::renameat2(from, old_name.c_str(), to, name.c_str(), flags) == 0 ? 0 : errno;
}

std::string identity_text(const struct stat& status) {
  return fmt::format("{} {}\n", status.st_dev, status.st_ino);
}

// Outermost first.
void remove_empty(const std::vector<fs::path>& folders) {
  std::error_code ignored;
  for (const auto& folder : std::views::reverse(folders)) fs::remove(folder, ignored);
}

Descriptor open_parent(const fs::path& target) {
  const auto parent = folder_of(target);
  Descriptor folder(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  require(static_cast<bool>(folder), ErrorKind::kIo, "{}: cannot be opened: {}", parent.string(),
          system_error_text(errno));
  return folder;
}

}  // namespace

WorkFolder::WorkFolder(fs::path target, bool resume, const fs::path& shown)
    : target_(target.has_filename() ? std::move(target) : target.parent_path()),  // "out/" is "out"
      name_(work_folder(target_).filename().string()),
      held_(work_folder(target_)) {
  make_parents();
  parent_ = open_parent(target_);
  lock_ = lock();
  if (!lock_) {
    throw Error(
        ErrorKind::kUsage,
        fmt::format("{}: another run is writing it", (shown.empty() ? target_ : shown).string()),
        "wait for it to end");
  }
  held_.hold(lock_);
  try {
    held_.with_its_name([&] {
      require_ours();
      put_back();
      if (!resume || fs::exists(path() / kWorkDamage)) clear(false);
      fs::create_directory(output());
    });
  } catch (...) {
    if (is_there(lock_)) ::unlinkat(parent_.get(), name_.c_str(), AT_REMOVEDIR);  // if empty
    remove_empty(made_parents_);
    throw;
  }
}

WorkFolder::~WorkFolder() {
  if (keep_) return;
  try {
    clear(true);
    if (is_there(lock_)) ::unlinkat(parent_.get(), name_.c_str(), AT_REMOVEDIR);
  } catch (...) {
    // A destructor has nobody to tell. What is left is told by the next run.
  }
  remove_empty(made_parents_);
}

// Missing parents are closed to others until there is something for them.
void WorkFolder::make_parents() {
  std::vector<fs::path> missing;
  for (fs::path at = target_.parent_path(); !at.empty() && !fs::exists(fs::symlink_status(at));
       at = at.parent_path()) {
    missing.insert(missing.begin(), at);
  }
  for (const auto& folder : missing) {
    const bool made = ::mkdir(folder.c_str(), 0700) == 0;
    require(made || fs::is_directory(folder), ErrorKind::kIo, "{}: cannot be created: {}",
            folder.string(), system_error_text(errno));
    if (made) made_parents_.push_back(folder);
  }
}

bool WorkFolder::is_there(const Descriptor& folder) const {
  struct stat there {};
  return ::fstatat(parent_.get(), name_.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
         same_file(status_of(folder.get()), there);
}

// An empty descriptor if another run holds it.
Descriptor WorkFolder::lock() {
  while (true) {
    const bool made = ::mkdirat(parent_.get(), name_.c_str(), 0700) == 0;
    require(made || errno == EEXIST, ErrorKind::kIo, "{}: cannot be created: {}",
            held_.shown().string(), system_error_text(errno));
    auto folder = open_folder(parent_.get(), name_);
    if (!folder) {
      struct stat there {};
      if (::fstatat(parent_.get(), name_.c_str(), &there, AT_SYMLINK_NOFOLLOW) != 0) continue;
      refuse(held_.shown(), S_ISLNK(there.st_mode) ? "is a symbolic link" : "is not a folder");
    }
    check_owner(folder->get(), held_.shown());
    if (::flock(folder->get(), LOCK_EX | LOCK_NB) != 0) return Descriptor();
    // Another run may have removed the folder between open and lock.
    if (is_there(*folder)) return std::move(*folder);
  }
}

// Nothing is in it that no run of ours puts there. Marks it.
void WorkFolder::require_ours() const {
  const auto entries = list_folder(held_.fd());
  if (!check_owner(held_.fd(), held_.shown())) {
    if (!entries.empty()) refuse(held_.shown(), "was not made by ferry");
    try {
      const WriteFile mark(path() / kWorkMark, static_cast<std::int64_t>(kMarkText.size()));
      mark.write_at(0, as_bytes(kMarkText));  // durable with the list of files: expect()
    } catch (const Error&) {
      ::unlinkat(held_.fd(), std::string(kWorkMark).c_str(), 0);
      throw;
    }
  }
  for (const auto& entry : entries) {
    const bool folder =
        entry.name == kWorkOutput || entry.name == kReplaced || entry.name == kWorkRanks;
    if (!is_own_name(entry.name) || !(folder ? entry.is_folder() : entry.is_file()))
      refuse(held_.shown() / entry.name, "was not made by ferry");
  }
  const auto files = read_names(path() / kWorkFiles);
  for (const auto& name : {kWorkOutput, kReplaced}) {
    const auto folder = open_folder(held_.fd(), name);
    if (!folder) continue;
    walk_folder(folder->get(), [&](const fs::path& file, const FolderEntry& entry) {
      if (entry.is_folder()) return;
      if (!files.contains(file)) refuse(held_.shown() / name / file, "was not made by ferry");
      // A run that was killed before the last step has given it the permissions of the source.
      if (entry.is_file() && (entry.status.st_mode & S_IWUSR) == 0)
        ::fchmodat(folder->get(), file.c_str(), (entry.status.st_mode & 07777U) | S_IWUSR, 0);
    });
  }
}

// A run that was killed between two renames has left the target here.
void WorkFolder::put_back() const {
  if (!fs::exists(path() / kReplaced)) return;
  rename_between(held_.fd(), kReplaced, parent_.get(), target_.filename(), RENAME_NOREPLACE);
}

// The mark of publication goes after what is large: until then an interrupted run is known to have
// published. The mark of ours goes last.
void WorkFolder::clear(bool all) const {
  const auto files = read_names(path() / kWorkFiles);
  const auto remove_folder = [&](std::string_view name, bool listed) {
    const auto folder = open_folder(held_.fd(), name);
    if (!folder) return;
    remove_below(folder->get(), {},
                 [&](const fs::path& file) { return !listed || files.contains(file); });
    ::unlinkat(held_.fd(), std::string(name).c_str(), AT_REMOVEDIR);
  };
  remove_folder(kWorkOutput, true);
  remove_folder(kReplaced, true);
  remove_folder(kWorkRanks, false);
  for (const auto& entry : list_folder(held_.fd())) {
    if (is_own_name(entry.name) && entry.name != kWorkMark && !entry.is_folder())
      ::unlinkat(held_.fd(), entry.name.c_str(), 0);
  }
  if (all) ::unlinkat(held_.fd(), std::string(kWorkMark).c_str(), 0);
}

bool WorkFolder::published_earlier(const fs::path& target) {
  HeldFolder held(work_folder(target));
  struct stat there {};
  if (::stat(target.c_str(), &there) != 0 || !join_work_folder(target, held)) return false;
  const auto mark = held.path() / kPublishing;
  return fs::exists(mark) && read_text(mark) == identity_text(there);
}

void WorkFolder::mark_published() {
  struct stat there {};
  require(::stat(target_.c_str(), &there) == 0, ErrorKind::kIo, "{}: cannot be examined: {}",
          target_.string(), system_error_text(errno));
  write_text(path() / kPublishing, identity_text(there));
  sync_directory(path());
}

void mark_damaged(const HeldFolder& work_folder) noexcept {
  try {
    write_text(work_folder.path() / kWorkDamage, "");
    sync_directory(work_folder.path());
  } catch (...) {
    // It is gone, which is as good; or the disk is: the next run will find the same.
  }
}

fs::path WorkFolder::output() const {
  return path() / kWorkOutput;
}
fs::path WorkFolder::journal() const {
  return path() / kJournal;
}

void WorkFolder::expect(const Names& files) {
  auto names = read_names(path() / kWorkFiles);
  names.insert(files.begin(), files.end());
  std::string text;
  for (const auto& name : names) text += name.string() + '\0';
  replace_text(path() / kWorkFiles, text, 0600);
}

void WorkFolder::set_modes(const PublishedModes& modes) const {
  const auto set = [&](int parent, const std::string& name, bool is_folder) {
    const Descriptor file(
        ::openat(parent, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    struct stat status {};
    const bool known = file && ::fstat(file.get(), &status) == 0;
    const auto mode = is_folder ? (status.st_mode & modes.folder) | S_IRWXU
                                : (status.st_mode & modes.file) | S_IRUSR;
    require(known && ::fchmod(file.get(), mode & 0777U) == 0, ErrorKind::kIo,
            "{}: cannot be given its permissions: {}", name, system_error_text(errno));
    if (is_folder) {
      require(::fsync(file.get()) == 0, ErrorKind::kIo, "{}: cannot be made durable: {}", name,
              system_error_text(errno));
    }
  };
  const auto files = read_names(path() / kWorkFiles);
  const auto base = open_folder(held_.fd(), kWorkOutput);
  require(base.has_value(), ErrorKind::kIo, "{}: is not there any more", output().string());
  walk_folder(base->get(), [&](const fs::path& file, const FolderEntry& entry) {
    if (!entry.is_folder() && (!entry.is_file() || !files.contains(file)))
      refuse(output() / file, "was not made by ferry");
    set(base->get(), file.string(), entry.is_folder());
  });
  set(held_.fd(), std::string(kWorkOutput), true);
}

void WorkFolder::publish(const std::function<Names(const fs::path&)>& replaceable,
                         const PublishedModes& modes) {
  held_.with_its_name([&] {
    set_modes(modes);
    const auto output_folder = open_folder(held_.fd(), kWorkOutput);
    const auto identity = status_of(output_folder->get());
    write_text(path() / kPublishing, identity_text(identity));
    sync_directory(path());
    exchange(replaceable);
    struct stat there {};
    require(::lstat(target_.c_str(), &there) == 0 && same_file(identity, there), ErrorKind::kIo,
            "{}: the folder that it lies in was moved away meanwhile", target_.string());
    for (const auto& parent : std::exchange(made_parents_, {})) {
      if (const auto folder = open_folder(AT_FDCWD, parent))
        ::fchmod(folder->get(), status_of(output_folder->get()).st_mode & 0777U);
    }
    sync_directory(folder_of(target_));
  });
}

void WorkFolder::replace_beside(std::string_view name, std::string_view text, unsigned mode) const {
  held_.with_its_name([&] {
    const auto temporary = fmt::format("{}{}", name, kTemporarySuffix);
    const std::string there_name(name);
    replace_text(path() / temporary, text, mode);
    struct stat there {};
    if (::fstatat(parent_.get(), there_name.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISREG(there.st_mode)) {
      ::fchmodat(held_.fd(), temporary.c_str(), there.st_mode & 0777U, 0);
    }
    const int error = rename_between(held_.fd(), temporary, parent_.get(), there_name, 0);
    require(error == 0, ErrorKind::kIo, "{}: cannot be replaced: {}",
            (folder_of(target_) / name).string(), system_error_text(error));
    sync_directory(folder_of(target_));
  });
}

void WorkFolder::exchange(const std::function<Names(const fs::path&)>& replaceable) {
  const auto name = target_.filename();
  const auto status = fs::symlink_status(target_);
  const bool occupied = fs::exists(status) && !(fs::is_directory(status) && fs::is_empty(target_));
  if (!occupied) {
    const int error = rename_between(held_.fd(), kWorkOutput, parent_.get(), name, 0);
    require(error == 0, ErrorKind::kIo, "{}: cannot be put in place: {}", target_.string(),
            system_error_text(error));
    return;
  }
  require(replaceable != nullptr, ErrorKind::kUsage, "{}: exists already", target_.string());
  expect(replaceable(target_));
  int error = rename_between(held_.fd(), kWorkOutput, parent_.get(), name, RENAME_EXCHANGE);
  auto old = kWorkOutput;
  if (error == EINVAL || error == ENOSYS) {
    // This file system cannot exchange: for a moment there is no target, and never a half one.
    old = kReplaced;
    error = rename_between(parent_.get(), name, held_.fd(), kReplaced, 0);
    if (error == 0) {
      error = rename_between(held_.fd(), kWorkOutput, parent_.get(), name, 0);
      if (error != 0) put_back();
    }
  }
  require(error == 0, ErrorKind::kIo, "{}: cannot be replaced: {}", target_.string(),
          system_error_text(error));
  try {
    replaceable(path() / old);  // nothing came into it meanwhile
  } catch (...) {
    if (old == kWorkOutput) {
      rename_between(held_.fd(), kWorkOutput, parent_.get(), name, RENAME_EXCHANGE);
    } else if (rename_between(parent_.get(), name, held_.fd(), kWorkOutput, 0) == 0) {
      put_back();
    }
    throw;
  }
}

bool join_work_folder(const fs::path& target, HeldFolder& held) {
  const auto path = work_folder(target);
  const auto folder = open_folder(AT_FDCWD, path);
  if (!folder) return false;
  if (!check_owner(folder->get(), path)) {
    const auto entries = list_folder(folder->get());  // none while it is being made
    if (std::ranges::any_of(entries, [](const auto& entry) { return !is_own_name(entry.name); }))
      refuse(path, "was not made by ferry");
    return false;
  }
  if (!same_file(status_of(folder->get()), status_of(held.fd()))) held.hold(*folder);
  return true;
}

}  // namespace ferry::distckpt
