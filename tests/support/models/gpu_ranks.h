// Tests of several GPUs: a process of this program for each rank, which runs the same test alone.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "models/distributed/world.h"
#include "tests/support/temp_dir.h"

namespace ferry::support {

// The end of a rank's process.
struct EndOfRank {
  int status = 0;  // of its exit; -1: by a signal, or not in time
  std::string output{};
};

inline int free_port() {
  const int socket_number = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(socket_number, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(getsockname(socket_number, reinterpret_cast<sockaddr*>(&address), &size), 0);
  close(socket_number);
  return ntohs(address.sin_port);
}

inline pid_t start_rank(int rank, int size, int port, const std::string& output) {
  const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
  std::vector<std::string> texts{"RANK=" + std::to_string(rank),
                                 "LOCAL_RANK=" + std::to_string(rank),
                                 "WORLD_SIZE=" + std::to_string(size),
                                 "LOCAL_WORLD_SIZE=" + std::to_string(size),
                                 "MASTER_ADDR=127.0.0.1",
                                 "MASTER_PORT=" + std::to_string(port)};
  for (char** one = environ; *one != nullptr; ++one) texts.emplace_back(*one);
  const auto program = std::filesystem::read_symlink("/proc/self/exe").string();
  std::vector<std::string> words{
      program, std::string("--gtest_filter=") + test->test_suite_name() + "." + test->name()};
  const auto pointers = [](std::vector<std::string>& of) {
    std::vector<char*> all;
    for (auto& one : of) all.push_back(one.data());
    all.push_back(nullptr);
    return all;
  };
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, output.c_str(), O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_adddup2(&files, STDOUT_FILENO, STDERR_FILENO);
  pid_t process = -1;
  EXPECT_EQ(posix_spawn(&process, program.c_str(), &files, nullptr, pointers(words).data(),
                        pointers(texts).data()),
            0);
  posix_spawn_file_actions_destroy(&files);
  return process;
}

inline EndOfRank wait_for_rank(pid_t process,
                               const std::string& output,
                               std::chrono::steady_clock::time_point deadline) {
  EndOfRank end{.status = -1};
  int status = 0;
  while (waitpid(process, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) kill(process, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (WIFEXITED(status)) end.status = WEXITSTATUS(status);
  std::ifstream file(output);
  end.output.assign(std::istreambuf_iterator<char>(file), {});
  return end;
}

inline void expect_all_passed(const std::vector<EndOfRank>& ends) {
  for (std::size_t rank = 0; rank < ends.size(); ++rank)
    EXPECT_EQ(ends[rank].status, 0) << "rank " << rank << ":\n" << ends[rank].output;
}

// Runs `body` on `size` GPUs of this host, on each in a process of its own, and `judge` in this
// one. Called once by a test, as its last statement. Skips the test where GPUs are fewer.
inline void on_gpus(
    int size,
    const models::World::Options& options,
    const std::function<void(models::World&)>& body,
    const std::function<void(const std::vector<EndOfRank>&)>& judge = expect_all_passed) {
  if (std::getenv("RANK") != nullptr) {
    auto world = models::World::from_environment(options);
    return body(world);
  }
  const int gpus = at::detail::getCUDAHooks().getNumGPUs();
  if (gpus < size) GTEST_SKIP() << "needs " << size << " GPUs, there are " << gpus;
  const TempDir folder;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const int port = free_port();
  const auto output = [&](int rank) { return (folder.path() / std::to_string(rank)).string(); };
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank)
    processes.push_back(start_rank(rank, size, port, output(rank)));
  std::vector<EndOfRank> ends;
  for (int rank = 0; rank < size; ++rank)
    ends.push_back(
        wait_for_rank(processes[static_cast<std::size_t>(rank)], output(rank), deadline));
  judge(ends);
}

}  // namespace ferry::support
