#include "trainer/plan/run_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/support/models/planned_runs.h"

namespace ferry::trainer {
namespace run_plan_test {

using support::grpo;
using support::llama_8b;

constexpr double kGiB = 1 << 30;
const DeviceSpec kH200 = *find_device("H200");

RunPlan plan_of(const PpoConfig& config, int ranks = 4, const DeviceSpec& device = kH200) {
  return plan_run(setup_of(config, {.actor = llama_8b(), .critic = llama_8b()}, ranks, device));
}

PhaseBytes bytes_in(const RunPlan& plan, const std::string& phase, std::size_t group = 0) {
  return std::ranges::find(plan.ranks.at(group).phases, phase, &PhasePlan::name)->bytes;
}

double seconds_in(const RunPlan& plan, const std::string& phase) {
  return std::ranges::find(plan.seconds, phase, &PhaseSeconds::name)->seconds;
}

// The weights of each layer, and embedding, output layer and last norm.
constexpr std::int64_t kParameters =
    32LL * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096) +
    2LL * 128256 * 4096 + 4096;

TEST(RunPlan, TakesNoMemoryForEachSequence) {
  auto config = grpo();
  config.actor.ppo_max_token_len_per_gpu = 6144;
  config.rollout.gpu_memory_utilization = 0.5;
  const auto few = plan_of(config);
  config.data.train_batch_size = 1 << 30;
  const auto many = plan_of(config);
  ASSERT_TRUE(few.fits());
  ASSERT_TRUE(many.fits());
  EXPECT_GT(seconds_in(many, "update_actor"), 1e6 * seconds_in(few, "update_actor"));
}

TEST(RunPlan, CountsWeightsGradientsAndSharesOfTheOptimizer) {
  const auto bytes = bytes_in(plan_of(grpo()), "update_actor");
  EXPECT_EQ(bytes.weights, 2 * kParameters);
  EXPECT_EQ(bytes.gradients, 4 * kParameters);
  EXPECT_EQ(bytes.optimizer, 12 * kParameters / 4);
}

TEST(RunPlan, CountsTheActivationsOfEachTokenAndLayer) {
  auto config = grpo();
  config.actor.ppo_max_token_len_per_gpu = 6144;
  const auto bytes = bytes_in(plan_of(config), "update_actor");
  // Two norms' inputs; the inputs of two projections; queries twice, keys and values, a number a
  // head; the feed-forward's input, gate, up and their product.
  const double of_layer =
      2 * (2 * 4096 + 2 * 4096 + 2 * 4096 + 2 * 1024 - 4096 + 4096 + 3 * 14336) + 4 * 32;
  const double of_head = 2 * (4096 + 4096);
  EXPECT_NEAR(static_cast<double>(bytes.activations), 6144 * (32 * of_layer + of_head),
              0.001 * 6144 * 32 * of_layer);
  // 4096 rows at a time, and the gradient of the output layer in fp32 and bf16.
  EXPECT_EQ(bytes.logits, 4096LL * 128256 * 2 + 128256LL * 4096 * (4 + 2));
}

// The gradient of a half of the output layer is smaller than the logits of both ranks, as they
// arrive and in one piece.
TEST(RunPlan, CountsTheLogitsThatTensorParallelRanksGatherInBitwise) {
  for (const auto alignment : {models::Alignment::kFast, models::Alignment::kBitwise}) {
    auto config = grpo();
    config.actor.megatron.parallel.tensor_model_parallel_size = 2;
    config.actor.megatron.alignment = alignment;
    config.actor.ppo_max_token_len_per_gpu = 6144;
    const auto bytes = bytes_in(plan_of(config), "update_actor");
    const auto beside = alignment == models::Alignment::kBitwise ? 2 * 4096LL * 128256 * 2
                                                                 : 128256LL / 2 * 4096 * (4 + 2);
    EXPECT_EQ(bytes.logits, 4096LL * 128256 / 2 * 2 + beside);
  }
}

// Measured on four H200: 101.7 GiB, of the tensors, while the cache is there.
TEST(RunPlan, IsWithinATenthOfThePeakThatWasMeasured) {
  auto config = grpo();
  config.actor.ppo_max_token_len_per_gpu = 6144;
  config.rollout.gpu_memory_utilization = 0.5;
  double peak = 0;
  for (const auto& phase : plan_of(config).ranks.front().phases)
    peak = std::max(peak, static_cast<double>(phase.bytes.on_device() - phase.bytes.context));
  EXPECT_NEAR(peak / kGiB, 101.7, 0.1 * 101.7);
}

// Measured: gen 7.6, old_log_prob 3.2, update_actor 12.3 s.
TEST(RunPlan, IsWithinAFifthOfTheSecondsThatWereMeasured) {
  auto config = grpo();
  config.actor.ppo_max_token_len_per_gpu = 6144;
  const auto plan = plan_of(config);
  ASSERT_TRUE(plan.fits());
  EXPECT_NEAR(seconds_in(plan, "gen"), 7.6, 0.2 * 7.6);
  EXPECT_NEAR(seconds_in(plan, "old_log_prob"), 3.2, 0.2 * 3.2);
  EXPECT_NEAR(seconds_in(plan, "update_actor"), 12.3, 0.2 * 12.3);
}

// It died in update_actor.
TEST(RunPlan, DoesNotFitWithMicroBatchesOf16384Tokens) {
  auto config = grpo();
  config.actor.ppo_max_token_len_per_gpu = 16384;
  const auto plan = plan_of(config);
  ASSERT_FALSE(plan.fits());
  EXPECT_TRUE(plan.misfits.front().starts_with("update_actor needs ")) << plan.misfits.front();
  EXPECT_NE(plan.misfits.front().find("ppo_max_token_len_per_gpu="), std::string::npos);
}

TEST(RunPlan, FoldsRanksThatAreAlike) {
  auto config = grpo();
  config.actor.megatron.parallel.pipeline_model_parallel_size = 4;
  const auto plan = plan_of(config, 8);
  ASSERT_EQ(plan.ranks.size(), 4U);
  EXPECT_EQ(plan.ranks[1].ranks, (std::vector<int>{2, 3}));
}

TEST(RunPlan, KeepsRolesOnRanksOfTheirOwnApart) {
  auto config = grpo();
  config.actor.ranks = {0, 1};
  config.rollout.ranks = {2, 3};
  const auto plan = plan_of(config);
  ASSERT_EQ(plan.ranks.size(), 2U);
  EXPECT_EQ(bytes_in(plan, "gen", 0).kv_cache, 0);
  EXPECT_EQ(bytes_in(plan, "gen", 1).gradients, 0);
  EXPECT_GT(bytes_in(plan, "gen", 1).kv_cache, 0);
}

TEST(RunPlan, HasTheOptimizerOnTheHostWhereItIsOffloaded) {
  auto config = grpo();
  config.actor.megatron.optimizer_offload = true;
  const auto plan = plan_of(config);
  EXPECT_EQ(bytes_in(plan, "gen").optimizer, 0);
  EXPECT_EQ(bytes_in(plan, "gen").host, 12 * kParameters / 4);
}

TEST(RunPlan, HasNoGradientsWhereTheyAreOffloaded) {
  auto config = grpo();
  config.actor.megatron.grad_offload = true;
  EXPECT_EQ(bytes_in(plan_of(config), "gen").gradients, 0);
  EXPECT_EQ(bytes_in(plan_of(config), "update_weights").gradients, 0);  // before the weights come
  EXPECT_GT(bytes_in(plan_of(config), "update_actor").gradients, 0);
}

TEST(RunPlan, NeverNeedsMoreWeightsWithMoreTensorParallelRanks) {
  std::int64_t before = std::numeric_limits<std::int64_t>::max();
  for (const int tp : {1, 2, 4, 8}) {
    auto config = grpo();
    config.actor.megatron.parallel.tensor_model_parallel_size = tp;
    config.rollout.tensor_model_parallel_size = tp;
    const auto bytes = bytes_in(plan_of(config, 8), "update_actor");
    EXPECT_LT(bytes.weights, before) << tp;
    before = bytes.weights;
  }
}

// A model that sees: its tower gives features to two layers.
models::TransformerConfig seeing_8b() {
  auto seeing = llama_8b();
  seeing.vision = models::VisionConfig{.depth = 3,
                                       .hidden_size = 48,
                                       .intermediate_size = 80,
                                       .num_heads = 3,
                                       .in_channels = 3,
                                       .patch_size = 4,
                                       .temporal_patch_size = 2,
                                       .spatial_merge_size = 2,
                                       .out_hidden_size = 4096,
                                       .num_position_embeddings = 36,
                                       .deepstack_visual_indexes = {0, 2}};
  return seeing;
}

std::int64_t tower_parameters() {
  const auto linear = [](std::int64_t out, std::int64_t in) { return out * (in + 1); };
  const auto block =
      std::int64_t{2} * 2 * 48 + linear(144, 48) + linear(48, 48) + linear(80, 48) + linear(48, 80);
  const auto mergers =
      3 * (linear(192, 192) + linear(4096, 192)) + std::int64_t{2} * (48 + 192 + 192);
  return linear(48, 96) + std::int64_t{36} * 48 + 3 * block + mergers;
}

// The stages that hold the first layers have it whole, and trained or not.
TEST(RunPlan, CountsTheTowerOfEveryRoleThatSees) {
  const DeviceSpec host{.name = "host", .memory = 64LL << 30, .on_host = true};
  const auto seeing = seeing_8b();
  const auto bytes = 2 * (tower_parameters() + 8192LL * 3 * 4096);
  const auto weights = [&](const models::TransformerConfig& actor, const DeviceSpec& device,
                           std::size_t group, bool frozen = false) {
    auto config = grpo();
    config.actor.megatron.freeze_vision_tower = frozen;
    config.actor.megatron.parallel.pipeline_model_parallel_size = 2;
    config.ref.megatron.parallel.pipeline_model_parallel_size = 2;
    config.actor.use_kl_loss = true;
    const auto plan = plan_run(setup_of(config, {.actor = actor, .critic = actor}, 2, device));
    return bytes_in(plan, "gen", group).weights;
  };
  EXPECT_EQ(weights(seeing, host, 0) - weights(llama_8b(), host, 0), 3 * bytes);
  EXPECT_EQ(weights(seeing, host, 1) - weights(llama_8b(), host, 1), bytes);  // of its rollout
  EXPECT_EQ(weights(seeing, host, 0, true), weights(seeing, host, 0));
  EXPECT_EQ(weights(seeing, kH200, 0) - weights(llama_8b(), kH200, 0), 3 * bytes);
  const auto judged = [&](const models::TransformerConfig& judge) {
    auto config = grpo();
    config.reward.enable = true;
    return bytes_in(plan_run(setup_of(config, {.actor = llama_8b(), .reward = judge}, 1, host)),
                    "gen")
        .weights;
  };
  EXPECT_EQ(judged(seeing) - judged(llama_8b()), bytes);
}

TEST(RunPlan, CountsWhatATowerNeedsThatIsTrained) {
  const auto learning = [](const models::TransformerConfig& actor, bool frozen) {
    auto config = grpo();
    config.actor.megatron.freeze_vision_tower = frozen;
    return bytes_in(plan_run(setup_of(config, {.actor = actor, .critic = actor}, 4, kH200)),
                    "update_actor");
  };
  const auto blind = learning(llama_8b(), false);
  const auto frozen = learning(seeing_8b(), true);
  const auto trained = learning(seeing_8b(), false);
  EXPECT_EQ(frozen.gradients, blind.gradients);
  EXPECT_EQ(frozen.optimizer, blind.optimizer);
  EXPECT_EQ(frozen.activations, blind.activations);
  EXPECT_EQ(frozen.weights - trained.weights, 2 * tower_parameters());  // the rollout's sleeps
  EXPECT_EQ(trained.gradients - blind.gradients, 4 * tower_parameters());
  EXPECT_NEAR(static_cast<double>(trained.optimizer - blind.optimizer),
              3.0 * static_cast<double>(tower_parameters()), 1024);
  // The inputs of three blocks of four patches, at least, and the results of three mergers.
  EXPECT_GT(trained.activations - blind.activations, 8192LL * 2 * (3 * 4 * 48 + 3 * 4096));
}

TEST(RunPlan, RefusesAStageThatLacksALayerOfItsTower) {
  auto config = grpo();
  auto& parallel = config.actor.megatron.parallel;
  parallel.pipeline_model_parallel_size = 2;
  parallel.num_layers_in_first_pipeline_stage = 1;
  const auto plan = [&] {
    return plan_run(setup_of(config, {.actor = seeing_8b(), .critic = seeing_8b()}, 2, kH200));
  };
  EXPECT_TRUE(
      support::fails(ErrorKind::kUsage, {"1 of the 2 layers", "freeze_vision_tower=true"}, plan));
  config.actor.megatron.freeze_vision_tower = true;
  EXPECT_EQ(plan().ranks.size(), 2U);
}

// Each has the weights and a cache; all read one copy.
TEST(RunPlan, CountsReplicasOfTheRollout) {
  const DeviceSpec host{.name = "host", .memory = 256LL << 30, .on_host = true};
  const auto bytes = [&](int num, bool elastic) {
    auto config = grpo();
    config.rollout.kv_cache_bytes = 1 << 30;
    config.rollout.replicas = {.num = num, .elastic = elastic};
    return bytes_in(plan_of(config, 1, host), "gen");
  };
  const auto none = bytes(0, false);
  EXPECT_EQ(none.replicas, 0);
  EXPECT_EQ(bytes(2, false).replicas, 6 * kParameters + (2LL << 30));
  EXPECT_EQ(bytes(0, true).replicas, 2 * kParameters);
  EXPECT_EQ(bytes(2, false).kv_cache, none.kv_cache);
}

// The first of two ranks that share the model has a whole one for its replicas.
TEST(RunPlan, CountsTheWholeModelBehindReplicas) {
  auto config = grpo();
  config.rollout.tensor_model_parallel_size = 2;
  const auto none = bytes_in(plan_of(config, 2), "gen");
  config.rollout.replicas.num = 1;
  const auto plan = plan_of(config, 2);
  ASSERT_EQ(plan.ranks.size(), 2U);
  EXPECT_EQ(bytes_in(plan, "gen", 0).weights - none.weights, 2 * kParameters);
  EXPECT_EQ(bytes_in(plan, "gen", 0).host - none.host, 2 * kParameters);
  EXPECT_EQ(bytes_in(plan, "gen", 1).weights, none.weights);
  EXPECT_EQ(bytes_in(plan, "gen", 1).host, none.host);
}

// One on a GPU of its own takes nothing of a rank's but for the weights on the host.
TEST(RunPlan, CountsReplicasOnTheGpuOfARank) {
  auto config = grpo();
  config.actor.ranks = {0};
  config.rollout.ranks = {1};
  config.rollout.gpu_memory_utilization = 0.5;
  config.rollout.kv_cache_bytes = 3LL << 30;
  const auto none = plan_of(config, 2);
  config.rollout.replicas.num = 3;
  const auto apart = plan_of(config, 2);
  config.rollout.replicas.devices = {2, 0};
  const auto beside = plan_of(config, 2);
  for (std::size_t rank : {0, 1}) {
    EXPECT_EQ(bytes_in(apart, "gen", rank).on_device(), bytes_in(none, "gen", rank).on_device());
    EXPECT_EQ(bytes_in(apart, "gen", rank).host - bytes_in(none, "gen", rank).host,
              rank == 1 ? 2 * kParameters : 0);
  }
  // A context, the weights, the cache and a step.
  const auto replica = bytes_in(beside, "update_actor", 0).replicas;
  EXPECT_GT(replica, (1LL << 30) + 2 * kParameters + (3LL << 30));
  EXPECT_LT(replica, (12LL << 30) + 2 * kParameters + (3LL << 30));
  EXPECT_EQ(bytes_in(beside, "gen", 1).replicas, 0);
  config.rollout.replicas.devices = {1};
  EXPECT_EQ(bytes_in(plan_of(config, 2), "gen", 1).replicas, 3 * replica);
}

TEST(RunPlan, SaysThatAReplicaHasTheWholeModel) {
  auto config = grpo();
  config.rollout.tensor_model_parallel_size = 4;
  DeviceSpec small = kH200;
  small.memory = 16LL << 30;
  config.rollout.replicas.num = 1;
  const auto said = [&](const DeviceSpec& device) {
    const auto setup = setup_of(config, {.actor = llama_8b(), .critic = llama_8b()}, 4, device);
    return replica_misfit(setup, plan_run(setup)).value_or("");
  };
  EXPECT_TRUE(said(small).starts_with("a replica, which has the whole model, needs"))
      << said(small);
  EXPECT_EQ(said(kH200), "");
  config.rollout.replicas.num = 0;
  EXPECT_EQ(said(small), "");
}

// Eight sequences have slots for the states of one prefix.
TEST(RunPlan, CountsTheStatesThatPrefixesHaveSlotsFor) {
  auto hybrid = llama_8b();
  hybrid.linear_attention_freq.assign(32, true);
  hybrid.linear_attention_freq.back() = false;
  hybrid.linear_conv_kernel_dim = 4;
  hybrid.linear_key_head_dim = hybrid.linear_value_head_dim = 128;
  hybrid.linear_num_key_heads = hybrid.linear_num_value_heads = 16;
  const auto cache = [&](bool prefixes, bool chunks) {
    auto config = grpo();
    config.actor.megatron.alignment = models::Alignment::kFast;
    config.rollout.max_num_seqs = 8;
    config.rollout.enable_prefix_caching = prefixes;
    config.rollout.enable_chunked_prefill = chunks;
    const auto plan = plan_run(setup_of(config, {.actor = hybrid, .critic = hybrid}, 4, kH200));
    return bytes_in(plan, "gen").kv_cache;
  };
  const auto state = 31 * (3 * 16 * 128 * 3 * 2 + 16 * 128 * 128 * 4);
  EXPECT_EQ(cache(true, true) - cache(false, true), state);
  EXPECT_EQ(cache(true, false), cache(false, false));
}

// Keys and values of 8 groups in bf16, in pieces and in one: of the longest sequence, if that is
// more than the tokens of a step.
TEST(RunPlan, CountsTheContextsThatAStepOfTheRolloutGathers) {
  const auto step = [](int response) {
    auto config = grpo();
    config.actor.ppo_max_token_len_per_gpu = 40960;
    config.data.max_response_length = response;
    config.rollout.max_num_batched_tokens = 8192;
    return bytes_in(plan_of(config), "gen").activations;
  };
  constexpr std::int64_t kOfToken = 2 * 2 * 8 * 128 * 2;
  EXPECT_EQ(step(8192 - 128), step(932));
  EXPECT_EQ(step(32768 - 128) - step(932), (32768 - 8192) * kOfToken);
}

// Latent attention has no heads of kv_channels.
TEST(RunPlan, CountsTheValuesThatTensorParallelRanksGatherInBitwise) {
  const auto seconds = [](std::int64_t kv_channels, std::int64_t v_head_dim) {
    auto model = llama_8b();
    model.kv_channels = kv_channels;
    model.multi_latent_attention = true;
    model.kv_lora_rank = 512;
    model.qk_head_dim = 128;
    model.qk_pos_emb_head_dim = 64;
    model.v_head_dim = v_head_dim;
    auto config = grpo();
    config.actor.megatron.alignment = models::Alignment::kBitwise;
    config.actor.megatron.parallel.tensor_model_parallel_size = 4;
    config.actor.ppo_max_token_len_per_gpu = 4096;
    config.rollout.gpu_memory_utilization = 0.5;
    const auto plan = plan_run(setup_of(config, {.actor = model, .critic = model}, 4, kH200));
    EXPECT_TRUE(plan.fits()) << plan.misfits.front();
    return plan.fits() ? seconds_in(plan, "update_actor") : 0;
  };
  EXPECT_EQ(seconds(0, 128), seconds(1024, 128));
  EXPECT_LT(seconds(128, 128), seconds(128, 256));
}

// Eight of 32 layers take a quarter of what all take.
TEST(RunPlan, CountsTheLayersThatAreComputedAgain) {
  const auto seconds = [](std::optional<models::Recompute::Method> method, int layers) {
    auto config = grpo();
    config.actor.ppo_max_token_len_per_gpu = 4096;
    if (method) config.actor.megatron.recompute_granularity = models::Recompute::Granularity::kFull;
    config.actor.megatron.recompute_method = method;
    config.actor.megatron.recompute_num_layers = layers;
    return seconds_in(plan_of(config, 4), "update_actor");
  };
  const auto none = seconds({}, 0);
  const auto all = seconds(models::Recompute::Method::kUniform, 1);
  EXPECT_NEAR(seconds(models::Recompute::Method::kBlock, 8) - none, (all - none) / 4, 1e-9);
  EXPECT_GT(all, 1.3 * none);
}

// Experts have about half of a mixture's operations, and their rows go to other ranks once more.
TEST(RunPlan, CountsTheModulesThatAreComputedAgain) {
  const auto seconds = [](std::vector<RecomputeModule> modules) {
    auto config = grpo();
    config.actor.megatron.parallel.expert_model_parallel_size = 8;
    config.rollout.expert_parallel_size = 8;
    config.actor.ppo_max_token_len_per_gpu = 4096;
    if (!modules.empty())
      config.actor.megatron.recompute_granularity = models::Recompute::Granularity::kSelective;
    config.actor.megatron.recompute_modules = std::move(modules);
    const auto plan = plan_run(setup_of(config, {.actor = support::qwen3_30b_a3b()}, 8, kH200));
    return seconds_in(plan, "update_actor");
  };
  using Modules = models::Recompute::Modules;
  const auto none = seconds({});
  EXPECT_GT(none, 0);
  EXPECT_EQ(seconds({&Modules::moe_act}), none);
  EXPECT_EQ(seconds({&Modules::mlp}), none);  // all layers have experts
  EXPECT_NEAR(seconds({&Modules::moe}), 1.2 * none, 0.04 * none);
  EXPECT_GT(seconds({&Modules::core_attn}), none);
  EXPECT_LT(seconds({&Modules::core_attn}), 1.05 * none);
}

// 32 GB of gradients of 8B in fp32, read and written by each.
TEST(RunPlan, CountsTheGradientsOfEachMicroBatch) {
  const auto seconds = [](int tokens) {
    auto config = grpo();
    config.actor.ppo_max_token_len_per_gpu = tokens;
    return seconds_in(plan_of(config, 4), "update_actor");
  };
  // 33,920 tokens of a rank and update, in micro-batches of up to three sequences and of one.
  const double each = 2 * 4 * static_cast<double>(kParameters) / kH200.memory_rate;
  EXPECT_NEAR(seconds(1060) - seconds(3180), 4 * (32 - 11) * each, 0.01 * each);
}

TEST(RunPlan, RefusesAMeshThatDoesNotFillItsRanks) {
  auto config = grpo();
  config.actor.megatron.parallel.tensor_model_parallel_size = 4;
  EXPECT_THROW(plan_of(config, 6), Error);
}

}  // namespace run_plan_test
}  // namespace ferry::trainer
