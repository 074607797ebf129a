#include "cli/sandbox/sandbox.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/close_range.h>
#include <linux/filter.h>
#include <linux/mount.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cli/sandbox/memory_watch.h"
#include "cli/sandbox/standard_files.h"
#include "cli/sandbox/user_map.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"

namespace ferry::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTemporary = "/dev/shm";
constexpr int kEndedEarly = 2;        // a status that nobody waits for
constexpr int kMostOpenFiles = 1024;  // of a process; the kernel has memory for each
constexpr int kNewNamespaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET |
                               CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;

void check(bool ok, const std::string& what) {
  require(ok, ErrorKind::kIo, "sandbox: {}: {}", what, std::strerror(errno));
}

void set_read_only(const char* path, bool read_only) {
  mount_attr attributes{};
  (read_only ? attributes.attr_set : attributes.attr_clr) = MOUNT_ATTR_RDONLY;
  const unsigned flags = read_only ? AT_RECURSIVE : 0;
  check(syscall(SYS_mount_setattr, AT_FDCWD, path, flags, &attributes, sizeof(attributes)) == 0,
        fmt::format("{} read-only", path));
}

// Devices that programs need, in place of all that there are. /dev/full reads as /dev/zero does,
// and cannot be mapped: a shared mapping of /dev/zero is memory that nothing counts.
void make_devices() {
  constexpr std::array<std::pair<const char*, const char*>, 5> kDevices{{
      {"null", "null"},
      {"zero", "full"},
      {"full", "full"},
      {"random", "random"},
      {"urandom", "urandom"},
  }};
  std::vector<std::pair<distckpt::Descriptor, std::string>> devices;
  for (const auto& [name, device] : kDevices) {
    distckpt::Descriptor fd(open(fmt::format("/dev/{}", device).c_str(), O_PATH | O_CLOEXEC));
    if (fd.get() >= 0) devices.emplace_back(std::move(fd), fmt::format("/dev/{}", name));
  }
  check(mount("tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k") == 0, "/dev");
  for (const auto& [fd, path] : devices) {
    const distckpt::Descriptor place(open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0666));
    check(place.get() >= 0 && mount(fmt::format("/proc/self/fd/{}", fd.get()).c_str(), path.c_str(),
                                    nullptr, MS_BIND, nullptr) == 0,
          path);
  }
  check(mkdir("/dev/shm", 01777) == 0, "/dev/shm");
}

bool is_within(const fs::path& path, const fs::path& folder) {
  return std::ranges::mismatch(folder, path).in1 == folder.end();
}

// Something empty in its place.
void hide(const fs::path& path) {
  const bool is_folder = fs::is_directory(path);
  const bool hidden = is_folder ? mount("tmpfs", path.c_str(), "tmpfs", 0, "mode=555,size=4k") == 0
                                : mount("/dev/null", path.c_str(), nullptr, MS_BIND, nullptr) == 0;
  check(hidden, fmt::format("hiding {}", path.string()));
}

void make_files(const SandboxOptions& options) {
  check(mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0, "mounts of its own");
  const auto here = fs::current_path();
  std::vector<fs::path> writable;
  for (const auto& folder : options.writable) writable.push_back(fs::absolute(folder));
  std::vector<fs::path> hidden;
  for (const auto& path : options.hidden) hidden.push_back(fs::canonical(path));
  for (const auto& folder : writable)
    check(mount(folder.c_str(), folder.c_str(), nullptr, MS_BIND, nullptr) == 0, folder.string());
  make_devices();
  for (const auto& path : hidden)
    if (!is_within(path, "/dev")) hide(path);  // the /dev of the sandbox has none of it
  // A container that covers parts of /proc allows no new one: then there is none at all.
  if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) != 0)
    check(mount("tmpfs", "/proc", "tmpfs", 0, "mode=555,size=4k") == 0, "/proc");
  set_read_only("/", true);
  for (const auto& folder : writable) set_read_only(folder.c_str(), false);
  // The working directory is still the folder below the mounts. One that is hidden is left.
  if (chdir(here.c_str()) != 0) check(chdir("/") == 0, "/");
  check(mount("tmpfs", kTemporary, "tmpfs", MS_NOSUID | MS_NODEV,
              "mode=1777,size=64m,nr_inodes=16k") == 0,
        kTemporary);
}

// Paths that mean something else than what is there outside.
void check_paths(const SandboxOptions& options) {
  for (const auto& one : options.writable) {
    const auto folder = fs::canonical(one);
    require(folder != "/" && !is_within(folder, "/dev") && !is_within(folder, "/proc"),
            ErrorKind::kUsage,
            "--writable {}: /, /dev and /proc are the sandbox's own; /dev/shm is writable",
            one.string());
    for (const auto& hidden : options.hidden)
      require(!is_within(folder, fs::canonical(hidden)), ErrorKind::kUsage,
              "--writable {}: it is within what --hide {} makes empty", one.string(),
              hidden.string());
  }
  for (const auto& one : options.hidden) {
    const auto path = fs::canonical(one);
    require(path != "/" && !is_within(path, "/proc"), ErrorKind::kUsage,
            "--hide {}: / and /proc are the sandbox's own", one.string());
  }
}

void set_limit(int resource, std::int64_t most, const char* name) {
  rlimit now{};
  check(getrlimit(static_cast<__rlimit_resource_t>(resource), &now) == 0, name);
  const auto value = std::min(static_cast<rlim_t>(most), now.rlim_max);
  const rlimit limit{value, value};
  check(setrlimit(static_cast<__rlimit_resource_t>(resource), &limit) == 0, name);
}

// Calls that reach beyond the program: namespaces, mounts, other processes, the kernel.
constexpr std::array kRefused {
  SYS_unshare, SYS_setns, SYS_mount, SYS_umount2, SYS_pivot_root, SYS_chroot, SYS_mount_setattr,
      SYS_move_mount, SYS_open_tree, SYS_fsopen, SYS_fsmount, SYS_fsconfig, SYS_fspick, SYS_ptrace,
      SYS_process_vm_readv, SYS_process_vm_writev, SYS_bpf, SYS_perf_event_open, SYS_keyctl,
      SYS_add_key, SYS_request_key, SYS_kexec_load, SYS_kexec_file_load, SYS_init_module,
      SYS_finit_module, SYS_delete_module, SYS_userfaultfd, SYS_io_uring_setup, SYS_io_uring_enter,
      SYS_io_uring_register, SYS_open_by_handle_at, SYS_reboot, SYS_swapon, SYS_swapoff, SYS_acct,
      SYS_quotactl, SYS_syslog, SYS_sethostname, SYS_setdomainname, SYS_pidfd_getfd,
      // Memory that no process maps, which nothing counts.
      SYS_memfd_create, SYS_memfd_secret, SYS_shmget, SYS_msgget, SYS_semget,
      // Named pipes, at which a reader of --writable would wait.
      SYS_mknodat,
#if defined(SYS_mknod)
      SYS_mknod,
#endif
};

// Calls that leave pages in pipes and sockets, each of which may be a part of a huge page, which
// nothing counts. Libraries read and write instead where the system does not know them.
constexpr std::array kUnknown{SYS_vmsplice, SYS_splice, SYS_tee, SYS_sendfile};

#if defined(__x86_64__)
constexpr unsigned kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr unsigned kArchitecture = AUDIT_ARCH_AARCH64;
#endif

// Loads are from seccomp_data: the number of the call, the architecture, arguments.
void filter_calls() {
  constexpr unsigned kNumber = 0, kOfArchitecture = 4;
  constexpr unsigned kFirstArgument = 16, kSecondArgument = 24, kThirdArgument = 32;
  constexpr unsigned kFourthArgument = 40;
  constexpr unsigned kX32 = 0x40000000;  // calls of another ABI, by other numbers
  constexpr auto kEqual = BPF_JMP | BPF_JEQ | BPF_K, kReturn = BPF_RET | BPF_K;
  constexpr auto kLoad = BPF_LD | BPF_W | BPF_ABS;
  constexpr unsigned kRefusal = SECCOMP_RET_ERRNO | EPERM;
  const auto statement = [](unsigned code, unsigned k) {
    return sock_filter BPF_STMT(static_cast<std::uint16_t>(code), k);
  };
  const auto jump = [](unsigned code, unsigned k, std::uint8_t yes, std::uint8_t no) {
    return sock_filter BPF_JUMP(static_cast<std::uint16_t>(code), k, yes, no);
  };
  std::vector<sock_filter> program{
      statement(kLoad, kOfArchitecture),
      jump(kEqual, kArchitecture, 1, 0),
      statement(kReturn, SECCOMP_RET_KILL_PROCESS),
      statement(kLoad, kNumber),
      jump(BPF_JMP | BPF_JGE | BPF_K, kX32, 0, 1),
      statement(kReturn, kRefusal),
      // The flags of clone3 lie in memory that a filter cannot read: libraries then call clone.
      jump(kEqual, SYS_clone3, 0, 1),
      statement(kReturn, SECCOMP_RET_ERRNO | ENOSYS),
  };
  for (const auto call : kRefused) {
    program.push_back(jump(kEqual, static_cast<unsigned>(call), 0, 1));
    program.push_back(statement(kReturn, kRefusal));
  }
  for (const auto call : kUnknown) {
    program.push_back(jump(kEqual, static_cast<unsigned>(call), 0, 1));
    program.push_back(statement(kReturn, SECCOMP_RET_ERRNO | ENOSYS));
  }
  // Shared memory without a file keeps its pages when a process unmaps parts of it, or lets them go
  // (MADV_DONTNEED): no process's pages are then its size.
  constexpr unsigned kSharedMemory = MAP_SHARED | MAP_ANONYMOUS;
  program.push_back(jump(kEqual, SYS_mmap, 0, 5));
  program.push_back(statement(kLoad, kFourthArgument));
  program.push_back(statement(BPF_ALU | BPF_AND | BPF_K, kSharedMemory));
  program.push_back(jump(kEqual, kSharedMemory, 0, 1));
  program.push_back(statement(kReturn, kRefusal));
  program.push_back(statement(kReturn, SECCOMP_RET_ALLOW));
  // Sockets of files reach services outside, and those of virtual machines their host: neither
  // belongs to a network namespace.
  program.push_back(jump(kEqual, SYS_socket, 0, 6));
  program.push_back(statement(kLoad, kFirstArgument));
  program.push_back(jump(kEqual, AF_INET, 3, 0));
  program.push_back(jump(kEqual, AF_INET6, 2, 0));
  program.push_back(jump(kEqual, AF_NETLINK, 1, 0));
  program.push_back(statement(kReturn, kRefusal));
  program.push_back(statement(kReturn, SECCOMP_RET_ALLOW));
  // A pair of datagram sockets sends to any socket of a file; pairs of streams keep to each other.
  constexpr unsigned kSocketTypes = 0xf;  // SOCK_TYPE_MASK of the kernel
  program.push_back(jump(kEqual, SYS_socketpair, 0, 6));
  program.push_back(statement(kLoad, kSecondArgument));
  program.push_back(statement(BPF_ALU | BPF_AND | BPF_K, kSocketTypes));
  program.push_back(jump(kEqual, SOCK_STREAM, 2, 0));
  program.push_back(jump(kEqual, SOCK_SEQPACKET, 1, 0));
  program.push_back(statement(kReturn, kRefusal));
  program.push_back(statement(kReturn, SECCOMP_RET_ALLOW));
  // A pipe keeps its size, which memory_watch.h counts.
  program.push_back(jump(kEqual, SYS_fcntl, 0, 4));
  program.push_back(statement(kLoad, kSecondArgument));
  program.push_back(jump(kEqual, F_SETPIPE_SZ, 0, 1));
  program.push_back(statement(kReturn, kRefusal));
  program.push_back(statement(kReturn, SECCOMP_RET_ALLOW));
  // A socket keeps its size, which memory_watch.h counts, and the call succeeds.
  constexpr std::array kSizes{SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE};
  program.push_back(jump(kEqual, SYS_setsockopt, 0, 10));
  program.push_back(statement(kLoad, kSecondArgument));
  program.push_back(jump(kEqual, SOL_SOCKET, 1, 0));
  program.push_back(statement(kReturn, SECCOMP_RET_ALLOW));
  program.push_back(statement(kLoad, kThirdArgument));
  for (std::size_t i = 0; i < kSizes.size(); ++i)
    program.push_back(jump(kEqual, static_cast<unsigned>(kSizes[i]),
                           static_cast<std::uint8_t>(kSizes.size() - i), 0));
  program.push_back(statement(kReturn, SECCOMP_RET_ALLOW));
  program.push_back(statement(kReturn, SECCOMP_RET_ERRNO));
  program.push_back(jump(kEqual, SYS_clone, 0, 3));
  program.push_back(statement(kLoad, kFirstArgument));
  program.push_back(jump(BPF_JMP | BPF_JSET | BPF_K, static_cast<unsigned>(kNewNamespaces), 0, 1));
  program.push_back(statement(kReturn, kRefusal));
  program.push_back(statement(kReturn, SECCOMP_RET_ALLOW));
  sock_fprog code{.len = static_cast<std::uint16_t>(program.size()), .filter = program.data()};
  check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no new privileges");
  check(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &code) == 0, "seccomp");
}

int exit_status(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

// The part of the environment that programs need, without anything that could be a secret.
std::vector<std::string> environment(const SandboxOptions& options) {
  std::vector<std::string> names{"PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TERM"};
  std::vector<std::string> all{fmt::format("HOME={}", kTemporary),
                               fmt::format("TMPDIR={}", kTemporary)};
  for (const auto& one : options.environment) {
    if (one.find('=') == std::string::npos)
      names.push_back(one);
    else
      all.push_back(one);
  }
  for (const auto& name : names)
    if (const char* const value = std::getenv(name.c_str()))
      all.push_back(fmt::format("{}={}", name, value));
  return all;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (auto& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

void become_program(const SandboxOptions& options, bool as_nobody) {
  auto words = options.command, variables = environment(options);
  // Files that whoever runs this has left open.
  check(syscall(SYS_close_range, 3U, ~0U, CLOSE_RANGE_CLOEXEC) == 0, "open files");
  allow_signals_of_children();
  if (as_nobody) become_nobody();
  filter_calls();
  std::signal(SIGXFSZ, SIG_DFL);  // ferry itself ignores it
  execvpe(words.front().c_str(), pointers_to(words).data(), pointers_to(variables).data());
  check(false, options.command.front());
}

// The first process of the sandbox, with which all others end. It is not the program itself, since
// the kernel keeps signals from a first process that does not handle them.
// `parent` ends when the parent does.
int watch_over_program(const SandboxOptions& options,
                       bool as_nobody,
                       const distckpt::Descriptor& parent) {
  check(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0, "the end of its parent");
  pollfd ended{parent.get(), POLLIN, 0};  // before that was set
  if (poll(&ended, 1, 0) > 0) return kEndedEarly;
  check(setsid() >= 0, "a session without the terminal, into which it could type");
  make_files(options);
  set_limit(RLIMIT_CORE, 0, "core files");
  set_limit(RLIMIT_AS, options.memory, "memory");
  set_limit(RLIMIT_NPROC, options.processes, "processes");
  set_limit(RLIMIT_NOFILE, kMostOpenFiles, "open files");
  if (options.cpu_seconds > 0) set_limit(RLIMIT_CPU, options.cpu_seconds, "CPU time");
  keep_signals_of_children();
  const auto program = fork();
  check(program >= 0, "fork");
  if (program == 0) become_program(options, as_nobody);
  return exit_status(wait_for_program(program, options.memory, !options.network));
}

}  // namespace

int run_in_sandbox(const SandboxOptions& options) {
  check_paths(options);
  const StandardFiles standard;
  const bool as_nobody = enter_user_namespace(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC |
                                              CLONE_NEWUTS | (options.network ? 0 : CLONE_NEWNET));
  std::array<int, 2> ends{};
  check(pipe2(ends.data(), O_CLOEXEC) == 0, "pipe");
  const distckpt::Descriptor of_child(ends[0]);
  distckpt::Descriptor held(ends[1]);
  const auto child = fork();
  check(child >= 0, "fork");
  if (child == 0) {
    held = {};
    try {
      _exit(watch_over_program(options, as_nobody, of_child));
    } catch (const Error& error) {
      fmt::print(stderr, "error: {}\n", error.what());
      _exit(2);
    }
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0) check(errno == EINTR, "waiting");
  return exit_status(status);
}

}  // namespace ferry::cli
