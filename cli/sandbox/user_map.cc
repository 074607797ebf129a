#include "cli/sandbox/user_map.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"

namespace ferry::cli {
namespace {

constexpr unsigned kNobody = 65534;

void check_user(bool ok, const char* what) {
  require(ok, ErrorKind::kIo, "sandbox: {}: {}", what, std::strerror(errno));
}

bool write_map(const std::string& file, const std::string& text) {
  const distckpt::Descriptor fd(open(file.c_str(), O_WRONLY | O_CLOEXEC));
  return fd.get() >= 0 &&
         write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

// A process outside of the namespace, which may map two users: a process inside maps its own alone.
class Mapper {
 public:
  Mapper() {
    check_user(pipe2(ends_.data(), O_CLOEXEC) == 0, "pipe");
    const auto folder = fmt::format("/proc/{}/", getpid());
    child_ = fork();
    check_user(child_ >= 0, "fork");
    if (child_ > 0) return;
    const auto map = fmt::format("0 0 1\n{0} {0} 1\n", kNobody);
    char begin = 0;
    close(ends_[1]);
    const bool told = read(ends_[0], &begin, 1) == 1;
    _exit(told && write_map(folder + "gid_map", map) && write_map(folder + "uid_map", map) ? 0 : 1);
  }
  ~Mapper() {
    for (const int fd : ends_)
      if (fd >= 0) close(fd);
    if (child_ > 0) waitpid(child_, nullptr, 0);
  }
  Mapper(const Mapper&) = delete;
  Mapper& operator=(const Mapper&) = delete;

  // Returns whether it could map this process, which has entered the namespace.
  bool map() {
    check_user(write(ends_[1], "x", 1) == 1, "pipe");
    int status = 0;
    while (waitpid(child_, &status, 0) < 0) check_user(errno == EINTR, "waiting");
    child_ = -1;
    return status == 0;
  }

 private:
  std::array<int, 2> ends_{-1, -1};
  pid_t child_ = -1;
};

void unshare_all(int flags) {
  if (unshare(flags | CLONE_NEWUSER) == 0) return;
  throw Error(ErrorKind::kUsage, fmt::format("sandbox: no namespaces: {}", std::strerror(errno)),
              "the system must allow user namespaces: sysctl user.max_user_namespaces, "
              "kernel.unprivileged_userns_clone, or the container's seccomp profile");
}

}  // namespace

bool enter_user_namespace(int flags) {
  const auto uid = getuid();
  const auto gid = getgid();
  if (uid == 0) {
    Mapper mapper;
    unshare_all(flags);
    if (mapper.map()) return true;
  } else {
    unshare_all(flags);
  }
  // Root that may not map two users, as in a container without CAP_SETUID.
  check_user(write_map("/proc/self/setgroups", "deny"), "setgroups");
  check_user(write_map("/proc/self/uid_map", fmt::format("{} {} 1", kNobody, uid)), "uid_map");
  check_user(write_map("/proc/self/gid_map", fmt::format("{} {} 1", kNobody, gid)), "gid_map");
  return false;
}

void become_nobody() {
  constexpr std::array kKept{CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH};
  check_user(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) == 0, "capabilities");
  check_user(setgroups(0, nullptr) == 0 && setresgid(kNobody, kNobody, kNobody) == 0 &&
                 setresuid(kNobody, kNobody, kNobody) == 0,
             "becoming nobody");
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> sets{};
  for (const auto one : kKept) {
    const auto bit = 1U << one;
    sets[0].effective |= bit;
    sets[0].permitted |= bit;
    sets[0].inheritable |= bit;
  }
  check_user(syscall(SYS_capset, &header, sets.data()) == 0, "capabilities");
  for (const auto one : kKept)
    check_user(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, one, 0, 0) == 0, "capabilities");
}

}  // namespace ferry::cli
