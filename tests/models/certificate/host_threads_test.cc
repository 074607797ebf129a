#include "models/certificate/host_threads.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "models/distributed/world.h"

namespace ferry::models {
namespace host_threads_test {

TEST(HostThreads, AreTheCoresSharedOutAndNoMoreThanTheWorkNeeds) {
  constexpr std::int64_t kLarge = 1 << 28;
  EXPECT_EQ(host_threads(16, 1, kLarge), 16);
  EXPECT_EQ(host_threads(16, 4, kLarge), 4);
  EXPECT_EQ(host_threads(16, 5, kLarge), 3);
  EXPECT_EQ(host_threads(4, 8, kLarge), 1);
  EXPECT_EQ(host_threads(16, 1, 0), 1);
  EXPECT_EQ(host_threads(16, 1, kWeightsOfThread - 1), 1);
  EXPECT_EQ(host_threads(16, 1, 3 * kWeightsOfThread), 3);
}

TEST(HostThreads, OfASmallModelAreOneUnlessSomebodySaysOtherwise) {
  models::TransformerConfig config;
  config.hidden_size = config.ffn_hidden_size = config.vocab_size = 64;
  config.num_attention_heads = config.num_query_groups = 4;
  config.kv_channels = 16;
  const World world({});
  const auto* const before = std::getenv("OMP_NUM_THREADS");
  const std::string kept = before == nullptr ? "" : before;
  setenv("OMP_NUM_THREADS", "3", 1);
  at::set_num_threads(3);
  choose_host_threads(world, config);
  EXPECT_EQ(at::get_num_threads(), 3);
  unsetenv("OMP_NUM_THREADS");
  choose_host_threads(world, config);
  EXPECT_EQ(at::get_num_threads(), 1);
  if (before != nullptr) setenv("OMP_NUM_THREADS", kept.c_str(), 1);
}

}  // namespace host_threads_test
}  // namespace ferry::models
