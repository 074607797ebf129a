#include "trainer/engine/memory_advice.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "models/device/memory_error.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/models/tiny_training.h"
#include "trainer/engine/run_options.h"

namespace ferry::trainer {
namespace memory_advice_test {

constexpr std::int64_t kMiB = 1 << 20;

// A model of 64 hidden features on the host, and what its actor's settings are called in a run of
// reinforcement learning.
class Advice : public testing::Test {
 protected:
  Advice()
      : world_({.device = at::kCPU}), mesh_(world_, {.make_vocab_size_divisible_by = 8}, "mesh") {
    const auto config = support::tiny_config(
        {.num_layers = 3, .head_dim = 16, .hidden = 64, .ffn = 160, .vocab = 96});
    owned_ = models::make_stage(config, mesh_, model_options(engine_));
    chunks_ = {owned_.front().get()};
    memory_ = models::model_memory(config, mesh_.shape(), mesh_.coordinates(),
                                   model_options(engine_).layout());
  }

  MemoryAdvice advice() const { return {settings_, engine_, memory_, mesh_}; }
  BatchShape batch(std::int64_t tokens) const {
    return {.largest = {.tokens = tokens, .keys = 512}, .longest_sequence = 512};
  }
  std::string fits(std::int64_t room, bool forward_only = false) const {
    return advice().of_batch(chunks_, batch(4096), forward_only).what_fits(room);
  }

  EngineConfig engine_{};
  MemorySettings settings_{.engine = "actor.megatron",
                           .learning = {.prefix = "actor.ppo_"},
                           .computing = {.prefix = "rollout.log_prob_"},
                           .longest = "data.max_response_length",
                           .longest_sequence = 512,
                           .beside_longest = 128,
                           .batch_size = 64};
  models::World world_;
  models::ParallelState mesh_;
  models::ModelMemory memory_;
  std::vector<std::unique_ptr<models::GPTModel>> owned_;
  std::vector<models::GPTModel*> chunks_;
};

TEST_F(Advice, NamesTheActivationsOfPassesThatLearn) {
  EXPECT_TRUE(advice()
                  .of_batch(chunks_, batch(4096), false)
                  .name.starts_with("the activations of micro-batches of up to 4096 tokens, "));
}

TEST_F(Advice, NamesOtherPassesForwardPasses) {
  EXPECT_TRUE(advice()
                  .of_batch(chunks_, batch(4096), true)
                  .name.starts_with("the forward passes of micro-batches of up to 4096 tokens, "));
}

TEST_F(Advice, SaysHowManyTokensWouldFit) {
  const auto said = fits(64 * kMiB);
  EXPECT_NE(said.find("what would fit: actor.ppo_max_token_len_per_gpu="), std::string::npos)
      << said;
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
  const auto said = fits(batch_bytes(chunks_, full, batch(4096).largest, 1) * 4 / 3);
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
  memory_.gradients = memory_.optimizer = 0;
  const auto said = advice().of_model("the parameters", kMiB, 0).what_fits(64 * kMiB);
  EXPECT_EQ(said.find("masters and moments"), std::string::npos) << said;
}

TEST_F(Advice, ExpectsNothingWhereAllFits) {
  EXPECT_EQ(advice().expect(chunks_, false), "");
}

TEST_F(Advice, ExpectsWhatWillBeMissing) {
  const auto all = room(world_.device());
  const auto said = advice().expect(chunks_, false, all - 64 * kMiB);
  EXPECT_TRUE(said.starts_with("micro-batches of up to 16384 tokens may need ")) << said;
  EXPECT_NE(said.find("actor.ppo_max_token_len_per_gpu="), std::string::npos) << said;
}

TEST_F(Advice, ExpectsNoMoreTokensThanABatchHas) {
  settings_.batch_size = 2;
  const auto said = advice().expect(chunks_, false, room(world_.device()));
  EXPECT_TRUE(said.starts_with("micro-batches of up to 1024 tokens may need ")) << said;
}

TEST(ShapeOf, IsThatOfTheLargestMicroBatch) {
  models::World world({.device = at::kCPU});
  const models::ParallelState mesh(world, {}, "mesh");
  const auto pack = [&](const std::vector<std::int64_t>& lengths) {
    return models::SequencePartition(models::pack(support::random_sequences(lengths, 96, 1)), mesh);
  };
  const std::vector batches{pack({40, 24}), pack({10, 20, 50})};
  const auto shape = shape_of(batches, 1);
  EXPECT_EQ(shape.largest.tokens, 80);
  EXPECT_DOUBLE_EQ(shape.largest.keys, (10.0 * 10 + 20 * 20 + 50 * 50) / 80);
  EXPECT_EQ(shape.longest_sequence, 50);
  EXPECT_EQ(shape.num_micro_batches, 2U);
}

TEST(GatherNotes, PutsRanksThatSayTheSameTogether) {
  models::run_ranks(3, {}, [](models::World& world) {
    const models::ProcessGroup group(world, "all", {0, 1, 2});
    const auto notes = gather_notes(
        group, world.rank() == 1 ? std::vector<std::string>{"b"} : std::vector<std::string>{"a"});
    EXPECT_EQ(notes, (std::vector<std::string>{"ranks 0, 2: a", "rank 1: b"}));
  });
}

}  // namespace memory_advice_test
}  // namespace ferry::trainer
