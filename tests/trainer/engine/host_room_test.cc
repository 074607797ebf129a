#include "trainer/engine/host_room.h"

#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <map>
#include <string>

#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace host_room_test {

// A tree of control groups, and the list of those of a process.
struct Groups {
  support::TempDir folder;

  void write(const std::map<std::string, std::string>& files) const {
    for (const auto& [name, text] : files) {
      const auto file = folder / name;
      std::filesystem::create_directories(file.parent_path());
      std::ofstream(file) << text;
    }
  }
  std::int64_t room() const { return cgroup_room(folder / "list", folder / "groups"); }
};

TEST(CgroupRoom, IsWhatTheTightestGroupAroundLeaves) {
  const Groups groups;
  groups.write({{"list", "0::/job/step\n"},
                {"groups/job/memory.max", "1000\n"},
                {"groups/job/memory.current", "400\n"},
                {"groups/job/memory.stat", "anon 300\ninactive_file 50\n"},
                {"groups/job/step/memory.max", "900\n"},
                {"groups/job/step/memory.current", "100\n"}});
  EXPECT_EQ(groups.room(), 650);
}

TEST(CgroupRoom, IsUnlimitedWhereNoGroupHasALimit) {
  const Groups groups;
  groups.write({{"list", "0::/job\n"},
                {"groups/job/memory.max", "max\n"},
                {"groups/job/memory.current", "400\n"}});
  EXPECT_EQ(groups.room(), std::numeric_limits<std::int64_t>::max());
}

TEST(CgroupRoom, ReadsTheGroupAtTheRootOfAContainer) {
  const Groups groups;
  groups.write(
      {{"list", "0::/\n"}, {"groups/memory.max", "1000\n"}, {"groups/memory.current", "1200\n"}});
  EXPECT_EQ(groups.room(), 0);
}

TEST(CgroupRoom, ReadsTheMemoryControllerOfVersion1) {
  const Groups groups;
  groups.write({{"list", "3:cpu,cpuacct:/job\n2:memory:/job\n"},
                {"groups/memory/job/memory.limit_in_bytes", "1000\n"},
                {"groups/memory/job/memory.usage_in_bytes", "300\n"},
                {"groups/memory/job/memory.stat", "inactive_file 7\ntotal_inactive_file 20\n"}});
  EXPECT_EQ(groups.room(), 720);
}

TEST(CgroupRoom, IsUnlimitedWithoutGroups) {
  const Groups groups;
  EXPECT_EQ(groups.room(), std::numeric_limits<std::int64_t>::max());
}

}  // namespace host_room_test
}  // namespace ferry::trainer
