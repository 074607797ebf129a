// Programs in a sandbox: what they return, reach and change. A child of the test enters it, since a
// process does not come back out of its namespaces.
#include "cli/sandbox/sandbox.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <string>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/temp_dir.h"

namespace ferry::cli {
namespace sandbox_test {

namespace fs = std::filesystem;
using support::TempDir;

constexpr int kNoSandbox = 99;

int run(const SandboxOptions& options) {
  std::fflush(nullptr);
  const auto child = fork();
  if (child == 0) {
    try {
      _exit(run_in_sandbox(options));
    } catch (const Error&) {
      _exit(kNoSandbox);
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

int run_shell(const std::string& script, SandboxOptions options = {}) {
  options.command = {"/bin/bash", "-c", script + " 2>/dev/null"};
  return run(options);
}

class Sandbox : public testing::Test {
 protected:
  void SetUp() override {
    if (run({.command = {"/bin/true"}}) == kNoSandbox) GTEST_SKIP() << "no user namespaces here";
  }
};

TEST_F(Sandbox, ReturnsTheStatusOfTheProgram) {
  EXPECT_EQ(run({.command = {"/bin/true"}}), 0);
  EXPECT_EQ(run_shell("exit 7;"), 7);
}

TEST_F(Sandbox, ReturnsTheSignalThatEndedTheProgram) {
  EXPECT_EQ(run_shell("kill -9 $$;"), 128 + SIGKILL);
}

TEST_F(Sandbox, KeepsFilesAsTheyAreButInFoldersThatStayWritable) {
  const TempDir dir;
  distckpt::write_text(dir / "file", "before");
  const auto write = "echo after > " + (dir / "file").string();
  EXPECT_NE(run_shell(write), 0);
  EXPECT_EQ(distckpt::read_text(dir / "file"), "before");
  EXPECT_EQ(run_shell(write, {.writable = {dir.path()}}), 0);
  EXPECT_EQ(distckpt::read_text(dir / "file"), "after\n");
}

TEST_F(Sandbox, HasATemporaryFolderOfItsOwn) {
  EXPECT_EQ(run_shell("echo x > $TMPDIR/ferry_sandbox_test && test -s $TMPDIR/ferry_sandbox_test"),
            0);
  EXPECT_FALSE(fs::exists("/dev/shm/ferry_sandbox_test"));
}

TEST_F(Sandbox, ReachesNoServerUnlessTheNetworkIsAllowed) {
  const distckpt::Descriptor server(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const at = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(bind(server.get(), at, length), 0);
  ASSERT_EQ(listen(server.get(), 4), 0);
  ASSERT_EQ(getsockname(server.get(), at, &length), 0);
  const auto connect = "exec 3<>/dev/tcp/127.0.0.1/" + std::to_string(ntohs(address.sin_port));
  EXPECT_NE(run_shell(connect), 0);
  EXPECT_EQ(run_shell(connect, {.network = true}), 0);
}

TEST_F(Sandbox, SeesNoOtherProcess) {
  EXPECT_NE(run_shell("kill -0 " + std::to_string(getpid())), 0);
}

TEST_F(Sandbox, BoundsMemory) {
  const std::string take = "x=$(head -c 100000000 /dev/zero | tr '\\0' a); test ${#x} -gt 0";
  EXPECT_NE(run_shell(take, {.memory = std::int64_t{60} << 20}), 0);
}

TEST_F(Sandbox, BoundsTimeOfTheCpu) {
  EXPECT_EQ(run_shell("while :; do :; done", {.cpu_seconds = 1}), 128 + SIGKILL);
}

TEST_F(Sandbox, SaysThatAProgramIsNotThere) {
  EXPECT_EQ(run({.command = {"/nowhere/program"}}), 2);
}

}  // namespace sandbox_test
}  // namespace ferry::cli
