#include "trainer/replicas/rollout_engine.h"

#include <fmt/format.h>

#include "converter/alignment/model_files.h"
#include "models/certificate/host_threads.h"
#include "models/pipeline_forward.h"
#include "rollout/vision/vision_encoder.h"
#include "trainer/config/ppo_rules.h"
#include "trainer/engine/run_options.h"

namespace ferry::trainer {

std::vector<std::unique_ptr<models::GPTModel>> rollout_model(const PpoConfig& config,
                                                             const converter::Checkpoint& origin,
                                                             const models::ParallelState& mesh) {
  auto options = model_options(config.actor.megatron);
  options.sequence_parallel = false;
  options.recompute = {};
  return models::make_stage(
      origin.map.config, mesh, options,
      fmt::format("{0}.tensor_model_parallel_size, {0}.expert_parallel_size", kRolloutSection));
}

RolloutEngine make_rollout(models::World& world,
                           const models::ParallelState& mesh,
                           const PpoConfig& config,
                           const converter::Checkpoint& origin,
                           const PromptEncoder& encoder,
                           const Tools& tools,
                           models::GPTModel* shared) {
  const auto& rollout = config.rollout;
  RolloutEngine made{.model = shared};
  if (shared == nullptr) {
    models::choose_host_threads(world, origin.map.config);
    made.own = rollout_model(config, origin, mesh);
    // The engine measures what a step of it needs, with weights that are some.
    (void)converter::load_model(made.own, origin, {.round = true});
    made.model = made.own.front().get();
  }
  std::shared_ptr<rollout::VisionEncoder> vision;
  if (const auto& reader = encoder.image_reader()) {
    const auto& of_actor = config.actor.megatron;
    vision = std::make_shared<rollout::VisionEncoder>(
        [&mesh, &origin, own = made.model->vision(), dtype = of_actor.dtype,
         alignment = of_actor.alignment]() -> rollout::VisionEncoder::Tower {
          if (own != nullptr) return rollout::part_of_model(own);
          return converter::make_vision_model(origin.map.config, mesh, dtype, alignment, origin);
        },
        reader->config);
  }
  made.engine = std::make_unique<rollout::LLMEngine>(
      *made.model,
      rollout::EngineOptions{
          .max_num_seqs = rollout.max_num_seqs,
          .max_num_batched_tokens = rollout.max_num_batched_tokens,
          .max_model_len = config.data.max_prompt_length + config.data.max_response_length,
          .gpu_memory_utilization = rollout.gpu_memory_utilization.value_or(0.5),
          .kv_cache_bytes = rollout.kv_cache_bytes,
          .enable_prefix_caching = rollout.enable_prefix_caching,
          .enable_chunked_prefill = rollout.enable_chunked_prefill,
          .enforce_eager = rollout.enforce_eager,
          .enable_return_routed_experts = config.actor.router_replay.mode == RouterReplayMode::kR3,
          .eos_token_ids = encoder.eos_token_ids(),
          .vision = vision});
  made.agents = std::make_unique<AgentRunner>(
      rollout.agents, tools,
      AgentLimits{.max_prompt_length = config.data.max_prompt_length,
                  .max_response_length = config.data.max_response_length},
      *made.engine, encoder, mesh.tp());
  return made;
}

}  // namespace ferry::trainer
