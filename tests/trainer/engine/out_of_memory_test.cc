#include "trainer/engine/out_of_memory.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "models/distributed/world.h"

namespace ferry::trainer {
namespace out_of_memory_test {

TEST(GatherNotes, PutsRanksThatSayTheSameTogether) {
  models::run_ranks(3, {}, [](models::World& world) {
    const models::ProcessGroup group(world, "all", {0, 1, 2});
    const auto notes = gather_notes(
        group, world.rank() == 1 ? std::vector<std::string>{"b"} : std::vector<std::string>{"a"});
    EXPECT_EQ(notes, (std::vector<std::string>{"ranks 0, 2: a", "rank 1: b"}));
  });
}

}  // namespace out_of_memory_test
}  // namespace ferry::trainer
