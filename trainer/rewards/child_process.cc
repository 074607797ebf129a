#include "trainer/rewards/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <thread>
#include <utility>

#include "distckpt/base/error.h"
#include "trainer/rewards/process_guard.h"

extern char** environ;

namespace ferry::trainer {
namespace {

constexpr std::size_t kLongestLine = std::size_t{16} << 20;

constexpr auto kToEnd = std::chrono::seconds(1);
constexpr auto kToBeKilled = std::chrono::seconds(5);  // by a guard, which goes on trying alone

struct Pipe {
  distckpt::Descriptor read{};
  distckpt::Descriptor write{};
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  require(pipe2(ends.data(), O_CLOEXEC) == 0, ErrorKind::kIo, "pipe: {}", std::strerror(errno));
  return {distckpt::Descriptor(ends[0]), distckpt::Descriptor(ends[1])};
}

std::pair<distckpt::Descriptor, distckpt::Descriptor> make_sockets() {
  std::array<int, 2> ends{};
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0, ErrorKind::kIo,
          "socketpair: {}", std::strerror(errno));
  return {distckpt::Descriptor(ends[0]), distckpt::Descriptor(ends[1])};
}

void set_nonblocking(int fd) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

// In a thread that writes: a program that does not read any more is an error, not a signal.
class WithoutSigpipe {
 public:
  WithoutSigpipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~WithoutSigpipe() {
    const timespec now{};
    if (!was_pending_) sigtimedwait(&pipe_, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSigpipe(const WithoutSigpipe&) = delete;
  WithoutSigpipe& operator=(const WithoutSigpipe&) = delete;

 private:
  sigset_t pipe_{};
  sigset_t before_{};
  bool was_pending_ = false;
};

std::string describe(int status) {
  return WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status))
                             : fmt::format("exit status {}", WEXITSTATUS(status));
}

class SpawnActions {
 public:
  SpawnActions() {
    posix_spawn_file_actions_init(&files_);
    posix_spawnattr_init(&attributes_);
    sigset_t none, ignored_here;
    sigemptyset(&none);
    sigemptyset(&ignored_here);
    sigaddset(&ignored_here, SIGPIPE);
    sigaddset(&ignored_here, SIGXFSZ);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setsigdefault(&attributes_, &ignored_here);
    posix_spawnattr_setpgroup(&attributes_, 0);
    posix_spawnattr_setflags(
        &attributes_, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  ~SpawnActions() {
    posix_spawnattr_destroy(&attributes_);
    posix_spawn_file_actions_destroy(&files_);
  }
  SpawnActions(const SpawnActions&) = delete;
  SpawnActions& operator=(const SpawnActions&) = delete;

  void give(const distckpt::Descriptor& file, int fd) {
    posix_spawn_file_actions_adddup2(&files_, file.get(), fd);
  }

  // Returns an errno.
  int spawn(std::vector<std::string>& words, pid_t& pid) {
    std::vector<char*> arguments;
    for (auto& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    return posix_spawnp(&pid, arguments.front(), &files_, &attributes_, arguments.data(), environ);
  }

 private:
  posix_spawn_file_actions_t files_{};
  posix_spawnattr_t attributes_{};
};

}  // namespace

ChildProcess::ChildProcess(const std::string& command)
    : ChildProcess(std::vector<std::string>{"/bin/sh", "-c", command}) {}

ChildProcess::ChildProcess(const std::vector<std::string>& words) {
  auto input = make_pipe(), output = make_pipe();
  auto [socket, its_socket] = make_sockets();
  // Another number, under which it stays open: the same one would stay closed on exec.
  const int fd = its_socket.get() == 3 ? 4 : 3;
  auto texts = guarded(words, fd);
  const bool has_guard = !texts.empty();
  if (!has_guard) texts = words;
  SpawnActions actions;
  actions.give(input.read, STDIN_FILENO);
  actions.give(output.write, STDOUT_FILENO);
  if (has_guard) actions.give(its_socket, fd);
  int error = actions.spawn(texts, pid_);
  if (error == 0 && has_guard) {
    guard_ = std::move(socket);
    its_socket = {};
    ssize_t count = 0;
    do {
      count = recv(guard_.get(), &error, sizeof(error), MSG_WAITALL);
    } while (count < 0 && errno == EINTR);
    if (count != sizeof(error)) error = ECHILD;
    if (error != 0) {
      guard_ = {};
      wait_for_end(kToBeKilled);  // nobody else reaps it
    }
  }
  require(error == 0, ErrorKind::kIo, "{}: cannot be started: {}", words.front(),
          std::strerror(error));
  input_ = std::move(input.write);
  output_ = std::move(output.read);
  set_nonblocking(input_.get());
  set_nonblocking(output_.get());
}

ChildProcess::~ChildProcess() {
  input_ = {};
  if (pid_ < 0) return;
  if (guard_) {
    guard_ = {};
    wait_for_end(kToBeKilled);
  } else if (!wait_for_end(kToEnd)) {
    kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

std::optional<int> ChildProcess::wait_for_end(std::chrono::milliseconds limit) {
  if (guard_) ::send(guard_.get(), &kEndWithProgram, 1, MSG_NOSIGNAL);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (int status = 0;;) {
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      if (!guard_) kill(-pid_, SIGKILL);  // what it has started, too
      pid_ = -1;
      return status;
    }
    if (std::chrono::steady_clock::now() >= deadline) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

std::optional<std::string> ChildProcess::exchange(std::string_view& unsent,
                                                  std::chrono::milliseconds limit) {
  if (auto line = take_line()) return line;
  if (ended_) return std::nullopt;
  std::array<pollfd, 2> fds{{{output_.get(), POLLIN, 0}, {input_.get(), POLLOUT, 0}}};
  const auto count = unsent.empty() ? 1U : 2U;
  if (poll(fds.data(), count, static_cast<int>(limit.count())) <= 0) return std::nullopt;
  if (count == 2 && fds[1].revents != 0) send(unsent);
  if (fds[0].revents != 0) receive();
  return take_line();
}

std::optional<std::string> ChildProcess::take_line() {
  const auto end = received_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  auto line = received_.substr(0, end);
  received_.erase(0, end + 1);
  return line;
}

void ChildProcess::send(std::string_view& unsent) {
  const WithoutSigpipe guard;
  const auto sent = write(input_.get(), unsent.data(), unsent.size());
  if (sent > 0)
    unsent.remove_prefix(static_cast<std::size_t>(sent));
  else if (sent < 0 && errno != EAGAIN && errno != EINTR)
    unsent = {};  // nobody reads: the end of the output says the rest
}

void ChildProcess::receive() {
  std::array<char, 65536> bytes{};
  const auto count = read(output_.get(), bytes.data(), bytes.size());
  if (count > 0) {
    received_.append(bytes.data(), static_cast<std::size_t>(count));
    if (received_.size() > kLongestLine && received_.find('\n') == std::string::npos)
      throw LineTooLong(ErrorKind::kCorrupt,
                        fmt::format("a line of more than {} bytes", kLongestLine));
  } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
    const auto status = wait_for_end(kToEnd);
    ended_ = status ? describe(*status) : "closed its output";
  }
}

}  // namespace ferry::trainer
