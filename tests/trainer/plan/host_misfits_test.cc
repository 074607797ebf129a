#include "trainer/plan/host_misfits.h"

#include <gtest/gtest.h>

namespace ferry::trainer {
namespace host_misfits_test {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

TEST(HostMisfits, AreNoneWhereTheRanksOfEachHostFindTheirMemory) {
  const std::vector<HostShare> shares{
      {"a", 60 * kGiB, 130 * kGiB}, {"a", 60 * kGiB, 128 * kGiB}, {"b", 100 * kGiB, 100 * kGiB}};
  EXPECT_EQ(host_misfits(shares), std::vector<std::string>{});
}

TEST(HostMisfits, AddTheRanksOfAHostAndTakeItsLeastMemory) {
  const std::vector<HostShare> shares{
      {"a", 60 * kGiB, 130 * kGiB}, {"b", 10 * kGiB, 100 * kGiB}, {"a", 60 * kGiB, 119 * kGiB}};
  EXPECT_EQ(
      host_misfits(shares),
      std::vector<std::string>{
          "ranks 0, 2 on a would pin 120.0 GiB of the host's memory, where 119.0 GiB are free"});
}

TEST(PinnedBytes, AreThoseOfTheRanksWorstPhase) {
  RunPlan plan;
  plan.ranks = {{.ranks = {0, 1}, .phases = {{"gen", {.host = 5}}, {"update_actor", {.host = 3}}}},
                {.ranks = {2}, .phases = {{"gen", {.host = 1}}}}};
  EXPECT_EQ(plan.most_bytes(1, &PhaseBytes::host), 5);
  EXPECT_EQ(plan.most_bytes(2, &PhaseBytes::host), 1);
  EXPECT_EQ(plan.most_bytes(3, &PhaseBytes::host), 0);
}

}  // namespace host_misfits_test
}  // namespace ferry::trainer
