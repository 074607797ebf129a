#include "trainer/plan/memory_advice.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::trainer {
namespace memory_advice_test {

constexpr std::int64_t kMiB = 1 << 20;

// A model of 64 hidden features on the host, and what its actor's settings are called in a run of
// reinforcement learning.
class Advice : public testing::Test {
 protected:
  ModelOnRank model() const {
    return {{.num_layers = 3,
             .hidden_size = 64,
             .ffn_hidden_size = 160,
             .num_attention_heads = 4,
             .num_query_groups = 2,
             .kv_channels = 16,
             .vocab_size = 96},
            engine_,
            {{.make_vocab_size_divisible_by = 8}, 1},
            {},
            {},
            /*on_host=*/true};
  }
  MemoryAdvice advice() const { return {settings_, engine_, model(), trains_}; }
  BatchShape batch(std::int64_t tokens) const {
    return {.largest = {.tokens = tokens, .keys = 512}, .longest_sequence = 512};
  }
  std::string fits(std::int64_t room, bool forward_only = false) const {
    return advice().ways(batch(4096), forward_only, room);
  }

  EngineConfig engine_{};
  MemorySettings settings_{.engine = "actor.megatron",
                           .learning = {.prefix = "actor.ppo_"},
                           .computing = {.prefix = "rollout.log_prob_"},
                           .longest = "data.max_response_length",
                           .longest_sequence = 512,
                           .beside_longest = 128,
                           .batch_size = 64};
  bool trains_ = true;
};

TEST_F(Advice, NamesTheActivationsOfPassesThatLearn) {
  EXPECT_TRUE(advice()
                  .of_batch(batch(4096), false)
                  .name.starts_with("the activations of micro-batches of up to 4096 tokens, "));
}

TEST_F(Advice, NamesOtherPassesForwardPasses) {
  EXPECT_TRUE(advice()
                  .of_batch(batch(4096), true)
                  .name.starts_with("the forward passes of micro-batches of up to 4096 tokens, "));
}

TEST_F(Advice, SaysHowManyTokensWouldFit) {
  const auto said = fits(64 * kMiB);
  EXPECT_NE(said.find("what would fit: actor.ppo_max_token_len_per_gpu="), std::string::npos)
      << said;
}

TEST_F(Advice, NamesFewerTokensThanThoseThatDidNotFit) {
  const auto said = fits(1024 * kMiB);  // by the formula more would
  EXPECT_NE(said.find("actor.ppo_max_token_len_per_gpu=3276"), std::string::npos) << said;
}

TEST_F(Advice, SaysSoUnderTheKeyOfPassesThatDoNotLearn) {
  const auto said = fits(16 * kMiB, /*forward_only=*/true);
  EXPECT_NE(said.find("rollout.log_prob_max_token_len_per_gpu="), std::string::npos) << said;
}

TEST_F(Advice, CountsSequencesWhereMicroBatchesDo) {
  settings_.learning.size = {.use_dynamic_bsz = false, .micro_batch_size_per_gpu = 8};
  const auto said = fits(64 * kMiB);
  EXPECT_NE(said.find("(actor.ppo_micro_batch_size_per_gpu)"), std::string::npos) << said;
}

TEST_F(Advice, OffersRecomputationAsTheRulesOfTheConfigurationWantIt) {
  const models::Recompute full{.granularity = models::Recompute::Granularity::kFull};
  const auto said = fits(batch_bytes(model(), full, batch(4096).largest, 1).total() * 4 / 3);
  EXPECT_NE(said.find("actor.megatron.recompute_granularity=full "
                      "actor.megatron.recompute_method=uniform "
                      "actor.megatron.recompute_num_layers=1, which needs "),
            std::string::npos)
      << said;
}

TEST_F(Advice, SaysThatNoneOfThemSufficesAlone) {
  const auto said = fits(kMiB / 4);
  EXPECT_NE(said.find("none of these alone"), std::string::npos) << said;
  EXPECT_NE(said.find("(actor.megatron.context_parallel_size)"), std::string::npos) << said;
}

TEST_F(Advice, NamesTheKeysThatShareAModel) {
  const auto said = advice().of_model("the gradients", 8 * kMiB, 0).what_fits(kMiB / 4);
  EXPECT_NE(said.find("actor.megatron.tensor_model_parallel_size"), std::string::npos) << said;
}

TEST_F(Advice, ListsParametersAloneOfARoleThatDoesNotLearn) {
  trains_ = false;
  const auto said = advice().of_model("the parameters", kMiB, 0).what_fits(64 * kMiB);
  EXPECT_EQ(said.find("masters and moments"), std::string::npos) << said;
}

TEST_F(Advice, ExpectsNothingWhereAllFits) {
  EXPECT_EQ(advice().expect(false, 4096 * kMiB), "");
}

TEST_F(Advice, ExpectsWhatWillBeMissing) {
  const auto said = advice().expect(false, 64 * kMiB);
  EXPECT_TRUE(said.starts_with("micro-batches of up to 16384 tokens may need ")) << said;
  EXPECT_NE(said.find("actor.ppo_max_token_len_per_gpu="), std::string::npos) << said;
}

TEST_F(Advice, ExpectsNoMoreTokensThanABatchHas) {
  settings_.batch_size = 2;
  const auto said = advice().expect(false, 0);
  EXPECT_TRUE(said.starts_with("micro-batches of up to 1024 tokens may need ")) << said;
}

}  // namespace memory_advice_test
}  // namespace ferry::trainer
