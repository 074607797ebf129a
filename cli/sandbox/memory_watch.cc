#include "cli/sandbox/memory_watch.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace ferry::cli {
namespace {

namespace fs = std::filesystem;

constexpr timespec kTick{.tv_sec = 0, .tv_nsec = 100'000'000};

sigset_t signals_of_children() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  return set;
}

// None are found where /proc is not of this namespace, as in some containers.
std::vector<fs::path> other_processes() {
  std::vector<fs::path> all;
  std::error_code error;
  for (fs::directory_iterator at("/proc", error), end; !error && at != end; at.increment(error)) {
    const auto name = at->path().filename().string();
    const bool is_number =
        std::ranges::all_of(name, [](unsigned char c) { return std::isdigit(c); });
    if (is_number && name != "1") all.push_back(at->path());
  }
  return all;
}

std::int64_t resident_bytes(const fs::path& process) {
  std::int64_t all = 0, resident = 0;
  std::ifstream(process / "statm") >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Shared pages count in parts.
std::int64_t proportional_bytes(const fs::path& process) {
  std::ifstream lines(process / "smaps_rollup");
  std::string word;
  for (std::int64_t kib = 0; lines >> word;)
    if (word == "Pss:" && lines >> kib) return kib * 1024;
  return resident_bytes(process);
}

// Bytes that a socket may hold; a program cannot change that of its own.
std::int64_t bytes_of_socket() {
  std::array<int, 2> ends{};
  int bytes = 0;
  socklen_t size = sizeof bytes;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) return 0;
  getsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &bytes, &size);
  for (const int end : ends) close(end);
  return bytes;
}

// All sockets of files and pairs of sockets in this network namespace, as "socket:[INODE]": also
// those that no process has open, since they are on their way to one (SCM_RIGHTS).
std::vector<std::string> sockets_of_network() {
  std::vector<std::string> all;
  std::ifstream lines("/proc/self/net/unix");
  std::string line;
  std::getline(lines, line);  // names of columns
  while (std::getline(lines, line)) {
    constexpr int kBefore = 6;  // columns before the inode
    std::istringstream words(line);
    std::string word;
    for (int i = 0; i <= kBefore; ++i) words >> word;
    all.push_back(fmt::format("socket:[{}]", word));
  }
  return all;
}

// The bytes that sockets and pipes may hold, which are in no process's pages. Several processes may
// have the same one open.
std::int64_t buffer_bytes(const std::vector<fs::path>& processes, bool own_network) {
  constexpr std::int64_t kPipe = 65536;
  static const std::int64_t of_socket = bytes_of_socket();
  std::set<std::string> all;
  std::int64_t sum = 0;
  for (const auto& process : processes) {
    std::error_code error;
    for (fs::directory_iterator at(process / "fd", error), end; !error && at != end;
         at.increment(error)) {
      std::error_code gone;
      const auto target = fs::read_symlink(at->path(), gone).string();
      const bool is_socket = target.starts_with("socket:");
      if ((is_socket || target.starts_with("pipe:")) && all.insert(target).second)
        sum += is_socket ? of_socket : kPipe;
    }
  }
  if (own_network)
    for (auto& one : sockets_of_network())
      if (all.insert(std::move(one)).second) sum += of_socket;
  return sum;
}

bool hold_more_than(std::int64_t memory, bool own_network) {
  const auto processes = other_processes();
  const auto buffers = buffer_bytes(processes, own_network);
  const auto sum_of = [&](std::int64_t (*bytes_of)(const fs::path&)) {
    auto sum = buffers;
    for (const auto& process : processes) sum += bytes_of(process);
    return sum;
  };
  return sum_of(resident_bytes) > memory && sum_of(proportional_bytes) > memory;
}

}  // namespace

void keep_signals_of_children() {
  const auto set = signals_of_children();
  sigprocmask(SIG_BLOCK, &set, nullptr);
}

void allow_signals_of_children() {
  const auto set = signals_of_children();
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

int wait_for_program(pid_t program, std::int64_t memory, bool own_network) {
  const auto set = signals_of_children();
  while (true) {
    int status = 0;
    const auto ended = waitpid(-1, &status, WNOHANG);
    if (ended == program) return status;
    if (ended > 0) continue;
    sigtimedwait(&set, nullptr, &kTick);
    if (!hold_more_than(memory, own_network)) continue;
    fmt::print(stderr, "error: sandbox: its processes together hold more than {} bytes of memory\n",
               memory);
    kill(-1, SIGKILL);
  }
}

}  // namespace ferry::cli
