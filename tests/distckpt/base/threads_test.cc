#include "distckpt/base/threads.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace threads_test {

namespace fs = std::filesystem;

// Binds the calling thread to the first of its cores.
bool take_one_core() {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof cores, &cores) != 0) return false;
  int first = 0;
  while (!CPU_ISSET(first, &cores)) ++first;
  CPU_ZERO(&cores);
  CPU_SET(first, &cores);
  return ::sched_setaffinity(0, sizeof cores, &cores) == 0;
}

TEST(AvailableCores, AreThoseOfTheAffinity) {
  if (available_cores() == 1) GTEST_SKIP() << "there is one core";
  int cores = 0;
  std::jthread([&] {
    if (take_one_core()) cores = available_cores();
  }).join();
  EXPECT_EQ(cores, 1);
}

TEST(AvailableCores, AreTheDefaultNumberOfThreads) {
  EXPECT_GE(available_cores(), 1);
  EXPECT_EQ(threads_or_cores(0), available_cores());
  EXPECT_EQ(threads_or_cores(1000), 1000);
}

// A machine's /proc and /sys.
class Quotas : public testing::Test {
 protected:
  void write(std::string_view name, std::string_view text) const {
    const auto path = root_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }

  std::optional<int> cores() const { return cores_of_quotas(root_.path()); }

  support::TempDir root_;
};

TEST_F(Quotas, AreNoLimitWhereThereAreNone) {
  EXPECT_EQ(cores(), std::nullopt);
  write("proc/self/cgroup", "0::/user.slice\n");
  write("sys/fs/cgroup/user.slice/cpu.max", "max 100000\n");
  EXPECT_EQ(cores(), std::nullopt);
}

TEST_F(Quotas, CountPartsOfACoreAsOne) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/cpu.max", "250000 100000\n");
  EXPECT_EQ(cores(), 3);
  write("sys/fs/cgroup/cpu.max", "10000 100000\n");
  EXPECT_EQ(cores(), 1);
}

TEST_F(Quotas, OfAGroupAboveLimitThoseBelow) {
  write("proc/self/cgroup", "0::/kubepods/pod:1/container\n");
  write("sys/fs/cgroup/kubepods/cpu.max", "800000 100000\n");
  write("sys/fs/cgroup/kubepods/pod:1/cpu.max", "400000 100000\n");
  write("sys/fs/cgroup/kubepods/pod:1/container/cpu.max", "max 100000\n");
  EXPECT_EQ(cores(), 4);
}

TEST_F(Quotas, MayBeOfTheFirstVersion) {
  write("proc/self/cgroup", "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n1:name=systemd:/\n");
  write("sys/fs/cgroup/cpu/docker/a/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu/docker/a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cores(), std::nullopt);
  write("sys/fs/cgroup/cpu/docker/a/cpu.cfs_quota_us", "200000\n");
  EXPECT_EQ(cores(), 2);
}

TEST_F(Quotas, OfAContainerLieWhereItsTreeBegins) {
  write("proc/self/cgroup", "3:cpu,cpuacct:/docker/a\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cores(), 2);
}

TEST(SideBySide, DoesEachOnce) {
  std::vector<std::atomic<int>> done(100);
  side_by_side(100, 7, [&](std::int64_t i) { ++done[static_cast<std::size_t>(i)]; });
  for (const auto& times : done) EXPECT_EQ(times, 1);
  side_by_side(0, 7, [](std::int64_t) { FAIL(); });
}

TEST(SideBySide, BeginsNothingAfterAFailure) {
  int done = 0;
  EXPECT_THROW(side_by_side(100, 1,
                            [&](std::int64_t i) {
                              if (i == 3) throw std::runtime_error("three");
                              ++done;
                            }),
               std::runtime_error);
  EXPECT_EQ(done, 3);
}

}  // namespace threads_test
}  // namespace ferry::distckpt
