#include "cli/sandbox/standard_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ranges>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::cli {
namespace {

void check(bool ok, const char* what) {
  require(ok, ErrorKind::kIo, "sandbox: {}: {}", what, std::strerror(errno));
}

void copy(int from, int to) {
  std::array<char, 65536> bytes{};
  for (;;) {
    const auto count = read(from, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    for (ssize_t done = 0; done < count;) {
      const auto written = write(to, bytes.data() + done, static_cast<std::size_t>(count - done));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return;
      done += written;
    }
  }
}

// Copies between a standard file and the pipe's end `outside` until one of them ends.
[[noreturn]] void be_copier(int number, int outside, int inside) {
  std::signal(SIGPIPE, SIG_DFL);
  close(inside);
  for (int other = 0; other <= STDERR_FILENO; ++other)
    if (other != number) close(other);
  if (number == STDIN_FILENO)
    copy(number, outside);
  else
    copy(outside, number);
  _exit(0);
}

}  // namespace

StandardFiles::StandardFiles() {
  std::array<struct stat, STDERR_FILENO + 1> found{};
  for (int number = 0; number <= STDERR_FILENO; ++number) {
    auto& file = found[static_cast<std::size_t>(number)];
    if (fstat(number, &file) != 0 || !S_ISREG(file.st_mode)) {
      file = {};
      continue;
    }
    Replaced one{.number = number,
                 .file = distckpt::Descriptor(fcntl(number, F_DUPFD_CLOEXEC, STDERR_FILENO + 1))};
    check(one.file.get() >= 0, "standard files");
    const auto& output = found[STDOUT_FILENO];
    if (number == STDERR_FILENO && S_ISREG(output.st_mode) && output.st_ino == file.st_ino &&
        output.st_dev == file.st_dev) {
      check(dup2(STDOUT_FILENO, number) >= 0, "standard files");
    } else {
      std::array<int, 2> ends{};
      check(pipe2(ends.data(), O_CLOEXEC) == 0, "pipe");
      const distckpt::Descriptor reads(ends[0]), writes(ends[1]);
      const auto& inside = number == STDIN_FILENO ? reads : writes;
      const auto& outside = number == STDIN_FILENO ? writes : reads;
      one.copier = fork();
      check(one.copier >= 0, "fork");
      if (one.copier == 0) be_copier(number, outside.get(), inside.get());
      check(dup2(inside.get(), number) >= 0, "standard files");
    }
    replaced_.push_back(std::move(one));
  }
}

StandardFiles::~StandardFiles() {
  for (const auto& one : replaced_) dup2(one.file.get(), one.number);
  for (const auto& one : replaced_ | std::views::reverse) {
    while (one.copier >= 0 && waitpid(one.copier, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

}  // namespace ferry::cli
