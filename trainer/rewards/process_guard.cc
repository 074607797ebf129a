#include "trainer/rewards/process_guard.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

namespace fs = std::filesystem;
using std::chrono::steady_clock;

constexpr auto kToEndByItself = std::chrono::seconds(1);
constexpr auto kToBeReaped = std::chrono::milliseconds(20);

void check_guard(bool ok, const char* what) {
  require(ok, ErrorKind::kIo, "guard: {}: {}", what, std::strerror(errno));
}

std::vector<char*> pointers_of(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (auto& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Its parent, as proc(5) has it behind the name, which may hold anything: "12 (na) me) S 1 ...".
pid_t parent_of(const fs::path& process) {
  std::string text;
  std::getline(std::ifstream(process / "stat"), text, '\0');
  const auto name_end = text.rfind(')');
  pid_t parent = -1;
  if (name_end != text.npos && name_end + 4 < text.size())
    std::from_chars(text.data() + name_end + 4, text.data() + text.size(), parent);
  return parent;
}

void kill_children() {
  std::error_code error;
  for (fs::directory_iterator at("/proc", error), end; !error && at != end; at.increment(error)) {
    const auto name = at->path().filename().string();
    pid_t child = -1;
    const auto read = std::from_chars(name.data(), name.data() + name.size(), child);
    if (read.ptr == name.data() + name.size() && parent_of(at->path()) == getpid())
      kill(child, SIGKILL);
  }
}

class Guard {
 public:
  Guard(const distckpt::Descriptor& socket, const std::vector<std::string>& words)
      : socket_(socket) {
    check_guard(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0, "adopting processes");
    // Signals are for the program: this process ends behind it.
    std::signal(SIGCHLD, SIG_DFL);
    sigset_t all, of_children;
    sigfillset(&all);
    check_guard(sigprocmask(SIG_SETMASK, &all, &before_) == 0, "signals");
    sigemptyset(&of_children);
    sigaddset(&of_children, SIGCHLD);
    ended_ = distckpt::Descriptor(signalfd(-1, &of_children, SFD_CLOEXEC | SFD_NONBLOCK));
    check_guard(ended_.get() >= 0, "signals of children");
    start(words);
    let_pipes_go();
  }

  int watch() {
    while (reap()) {
      const bool over = status_ && (ends_with_program_ || until_);
      if (over || (until_ && steady_clock::now() >= *until_)) kill_all();
      wait();
    }
    return status_.value_or(0);
  }

 private:
  void start(const std::vector<std::string>& words) {
    std::array<int, 2> ends{};
    check_guard(pipe2(ends.data(), O_CLOEXEC) == 0, "pipe");
    const distckpt::Descriptor failed(ends[0]);
    distckpt::Descriptor fails(ends[1]);
    const auto guard = getpid();
    program_ = fork();
    check_guard(program_ >= 0, "fork");
    if (program_ == 0) become_program(words, guard, fails.get());
    fails = {};
    int error = 0;  // the pipe closes as the program begins
    while (read(failed.get(), &error, sizeof(error)) < 0 && errno == EINTR) continue;
    [[maybe_unused]] const auto told = write(socket_.get(), &error, sizeof(error));
  }

  [[noreturn]] void become_program(std::vector<std::string> words, pid_t guard, int fails) const {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // of the guard's only thread
    if (getppid() != guard) _exit(127);
    sigprocmask(SIG_SETMASK, &before_, nullptr);
    execvp(words.front().c_str(), pointers_of(words).data());
    [[maybe_unused]] const auto told = write(fails, &errno, sizeof(errno));
    _exit(127);
  }

  // The ends of the program's pipes, whose closing says that it has ended.
  void let_pipes_go() {
    const distckpt::Descriptor nothing(open("/dev/null", O_RDWR | O_CLOEXEC));
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO})
      if (nothing.get() < 0 || dup2(nothing.get(), fd) < 0) close(fd);
  }

  // Returns whether there are any children, the program or others.
  bool reap() {
    for (int status = 0;;) {
      const auto child = waitpid(-1, &status, WNOHANG);
      if (child == 0) return true;
      if (child < 0 && errno != EINTR) return false;
      if (child == program_) status_ = status;
    }
  }

  void kill_all() {
    if (!status_) kill(-program_, SIGKILL);
    kill_children();
    is_killing_ = true;
  }

  void wait() {
    auto limit = std::chrono::milliseconds(-1);
    if (is_killing_)
      limit = kToBeReaped;  // what was a grandchild is a child by then
    else if (until_)
      limit = std::max(std::chrono::ceil<std::chrono::milliseconds>(*until_ - steady_clock::now()),
                       std::chrono::milliseconds(0));  // a negative one is without end
    std::array<pollfd, 2> fds{
        {{ended_.get(), POLLIN, 0}, {until_ ? -1 : socket_.get(), POLLIN, 0}}};
    if (poll(fds.data(), fds.size(), static_cast<int>(limit.count())) <= 0) return;
    signalfd_siginfo signals{};
    if (fds[0].revents != 0)
      while (read(ended_.get(), &signals, sizeof(signals)) > 0) continue;
    if (fds[1].revents == 0) return;
    char word = 0;
    const auto count = read(socket_.get(), &word, 1);
    if (count == 1)
      ends_with_program_ = ends_with_program_ || word == kEndWithProgram;
    else if (count == 0 || errno != EINTR)
      until_ = steady_clock::now() + kToEndByItself;
  }

  const distckpt::Descriptor& socket_;
  distckpt::Descriptor ended_{};
  sigset_t before_{};
  pid_t program_ = -1;
  std::optional<int> status_;  // the program's
  bool ends_with_program_ = false;
  bool is_killing_ = false;
  std::optional<steady_clock::time_point> until_;  // since the other end has closed
};

}  // namespace

std::vector<std::string> guarded(const std::vector<std::string>& words, int fd) {
  constexpr const char* kThis = "/proc/self/exe";
  std::error_code error;
  const auto self = fs::read_symlink(kThis, error);
  auto guard = self.parent_path() / "ferry";  // it starts in a hundredth of the time
  std::error_code absent;
  if (!fs::is_regular_file(guard, absent) || access(guard.c_str(), X_OK) != 0) guard = kThis;
  if (error || (guard == kThis && !self.filename().string().starts_with("ferry-torch"))) return {};
  std::vector<std::string> all{guard.string(), "guard", std::to_string(fd)};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

int guard_program(const distckpt::Descriptor& socket, const std::vector<std::string>& words) {
  check_guard(fcntl(socket.get(), F_SETFD, FD_CLOEXEC) == 0, "its socket");
  return Guard(socket, words).watch();
}

void run_guard(const std::vector<std::string>& words) noexcept {
  int status = 2 << 8;
  try {
    int fd = -1;
    require(words.size() > 1, ErrorKind::kUsage, "guard: FD and a program are missing");
    std::from_chars(words[0].data(), words[0].data() + words[0].size(), fd);
    status = guard_program(distckpt::Descriptor(fd), {words.begin() + 1, words.end()});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  if (WIFSIGNALED(status)) {  // ends as the program has ended, but leaves no second core file
    const rlimit none{};
    setrlimit(RLIMIT_CORE, &none);
    const auto number = WTERMSIG(status);
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, number);
    std::signal(number, SIG_DFL);
    raise(number);
    sigprocmask(SIG_UNBLOCK, &one, nullptr);
  }
  _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

}  // namespace ferry::trainer
