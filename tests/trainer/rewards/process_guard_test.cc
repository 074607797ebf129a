// A guard in a process of its own, as `ferry guard` runs it.
#include "trainer/rewards/process_guard.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace process_guard_test {

using distckpt::Descriptor;

class ProcessGuard : public testing::Test {
 protected:
  void start(const std::vector<std::string>& words) {
    std::array<int, 2> ends{};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
    socket_ = Descriptor(ends[0]);
    const Descriptor guards(ends[1]);
    guard_ = fork();
    ASSERT_GE(guard_, 0);
    if (guard_ > 0) return;
    socket_ = {};
    const auto status = guard_program(guards, words);
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }

  // The errno of starting the program.
  int began() const {
    int error = -1;
    EXPECT_EQ(read(socket_.get(), &error, sizeof error), static_cast<ssize_t>(sizeof error));
    return error;
  }

  int exit_status() {
    int status = 0;
    EXPECT_EQ(waitpid(guard_, &status, 0), guard_);
    EXPECT_TRUE(WIFEXITED(status));
    return WEXITSTATUS(status);
  }

  // The number of a process that the program writes to that file when it has started it.
  pid_t started() const {
    for (int i = 0; i < 1000; ++i) {
      const auto path = dir_ / "started";
      if (std::filesystem::exists(path)) return std::stoi(distckpt::read_text(path));
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ADD_FAILURE() << "the program has started nothing";
    return 0;
  }

  // A shell's words that start a sleeper in a session of its own, and go on.
  std::string start_sleeper() const {
    const auto path = (dir_ / "started").string();
    return "setsid sh -c 'echo $$ > " + path + ".new; mv " + path + ".new " + path +
           "; exec sleep 1000' >/dev/null & while [ ! -e " + path + " ]; do sleep .01; done; ";
  }

  static bool is_there(pid_t process) { return kill(process, 0) == 0; }

  support::TempDir dir_;
  Descriptor socket_;
  pid_t guard_ = -1;
};

TEST_F(ProcessGuard, HasTheStatusOfTheProgram) {
  start({"sh", "-c", "exit 7"});
  EXPECT_EQ(began(), 0);
  EXPECT_EQ(exit_status(), 7);
}

TEST_F(ProcessGuard, SaysWhyAProgramDoesNotStart) {
  start({"/nowhere/program"});
  EXPECT_EQ(began(), ENOENT);
  EXPECT_EQ(exit_status(), 127);
}

TEST_F(ProcessGuard, KillsTheProgramAndWhatItStartedBehindTheSocketsEnd) {
  start({"sh", "-c", start_sleeper() + "wait"});
  const auto sleeper = started();
  ASSERT_TRUE(is_there(sleeper));
  socket_ = {};
  EXPECT_EQ(exit_status(), 128 + SIGKILL);
  EXPECT_FALSE(is_there(sleeper));
}

TEST_F(ProcessGuard, EndsWithTheProgramIfToldSo) {
  start({"sh", "-c", start_sleeper() + "exit 3"});
  ASSERT_EQ(write(socket_.get(), &kEndWithProgram, 1), 1);
  const auto sleeper = started();
  EXPECT_EQ(exit_status(), 3);
  EXPECT_FALSE(is_there(sleeper));
}

TEST_F(ProcessGuard, WaitsForWhatTheProgramHasStarted) {
  start({"sh", "-c", start_sleeper() + "exit 3"});
  const auto sleeper = started();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the program has ended
  EXPECT_EQ(waitpid(guard_, nullptr, WNOHANG), 0);
  ASSERT_EQ(kill(sleeper, SIGTERM), 0);
  EXPECT_EQ(exit_status(), 3);
}

}  // namespace process_guard_test
}  // namespace ferry::trainer
