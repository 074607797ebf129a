#include "trainer/plan/auto_settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "trainer/config/ppo_rules.h"
#include "trainer/plan/auto_offload.h"
#include "trainer/plan/run_plan.h"

namespace ferry::trainer {
namespace {

using distckpt::ceil_div;
using models::Recompute;
using Granularity = Recompute::Granularity;

constexpr std::int64_t kEnoughTokens = 4096;  // for products to be fast
// Fewer cost a dense model less than layers that are computed again.
constexpr std::int64_t kEnoughTokensOfAllLayers = 2048;
// Fewer micro-batches of an update leave the stages of a pipeline idle for longer.
constexpr std::int64_t kMicroBatchesOfStage = 4;
constexpr std::int64_t kTokenStep = 64;
constexpr double kLeastCacheShare = 0.05;
constexpr double kMostCacheShare = 0.95;

// The settings of a role that may be left open.
struct OpenSettings {
  std::string engine{};  // the section of its mesh
  EngineConfig* of_engine = nullptr;
  std::string tokens_key{};
  std::optional<int>* tokens = nullptr;  // null: they are not open
  std::int64_t most_tokens = 0;
};

// The work of a role that its micro-batches have to fit.
Phase largest_phase(const RunSetup& setup, std::size_t role) {
  const auto phases = phases_of(setup);
  const auto found = std::ranges::find_if(phases, [&](const Phase& phase) {
    return phase.role == role &&
           (phase.work == Phase::Work::kLearn ||
            (phase.work == Phase::Work::kForward && !setup.roles[role].trains));
  });
  require(found != phases.end(), ErrorKind::kBug, "{} computes nothing",
          name_of(setup.roles[role].role));
  return *found;
}

// Tokens of the longest micro-batches that fit on every rank.
std::int64_t fitting(const RunSetup& setup,
                     const std::vector<RankGroup>& groups,
                     const Phase& phase,
                     const Recompute& recompute) {
  const auto& role = setup.roles[phase.role];
  const auto memory = usable(setup.device.memory, setup.device.on_host);
  auto fits = std::numeric_limits<std::int64_t>::max();
  for (const auto& group : groups) {
    const auto& model = group.models[phase.role];
    if (!model) continue;
    const bool forward_only = phase.work == Phase::Work::kForward;
    const auto batch =
        MemoryAdvice(role.memory, role.engine, *model, role.trains).largest_batch(forward_only);
    const auto room = memory - resting_bytes(setup, group, phase).on_device();
    fits = std::min(fits, tokens_that_fit(*model, forward_only ? kForwardOnly : recompute,
                                          batch.largest, batch.num_micro_batches, room));
  }
  return fits;
}

// The first computes least again, the last keeps least.
std::vector<Recompute> ways_to_recompute(const RunSetup& setup, std::size_t role) {
  std::vector<Recompute> ways{{}};
  const auto& of = setup.roles[role];
  std::int64_t layers = 0;  // of a chunk, at most
  for (int stage = 0; stage < of.mesh().pp(); ++stage) {
    for (const auto& chunk : models::stage_chunks(of.model, of.engine.parallel, stage))
      layers = std::max(layers, static_cast<std::int64_t>(chunk.layers.size()));
  }
  for (std::int64_t count = 1; count < layers; ++count)
    ways.push_back({.granularity = Granularity::kFull,
                    .method = Recompute::Method::kBlock,
                    .num_layers = count});
  ways.push_back({.granularity = Granularity::kFull});
  return ways;
}

void set_recompute(EngineConfig& engine, const Recompute& recompute) {
  engine.recompute_granularity = recompute.granularity;
  if (recompute.granularity != Granularity::kFull) return;
  engine.recompute_method = recompute.method;
  engine.recompute_num_layers = static_cast<int>(recompute.num_layers);
}

std::vector<std::string> words_of(const OpenSettings& open) {
  const auto& engine = *open.of_engine;
  if (engine.recompute_granularity != Granularity::kFull)
    return {fmt::format("{}.recompute_granularity=none", open.engine)};
  return {fmt::format("{}.recompute_granularity=full", open.engine),
          fmt::format("{}.recompute_method={}", open.engine, name_of(*engine.recompute_method)),
          fmt::format("{}.recompute_num_layers={}", open.engine, *engine.recompute_num_layers)};
}

// The most tokens of a micro-batch that leave every stage enough of them to do; `of_batch`: this
// rank's of an update.
std::int64_t most_in_pipeline(const RoleSetup& role, std::int64_t of_batch) {
  const auto stages = std::int64_t{role.mesh().pp()};
  if (stages == 1) return std::numeric_limits<std::int64_t>::max();
  const auto chunks =
      static_cast<std::int64_t>(models::stage_chunks(role.model, role.engine.parallel, 0).size());
  return of_batch / ceil_div(kMicroBatchesOfStage * stages, chunks);
}

// Chooses a role's open settings in place.
void choose(const RunSetup& setup,
            std::size_t index,
            const OpenSettings& open,
            std::vector<std::string>& said) {
  const auto& role = setup.roles[index];
  const bool of_tokens = open.tokens != nullptr && !*open.tokens;
  const bool of_recompute = role.trains && !open.of_engine->recompute_granularity;
  if (!of_tokens && !of_recompute) return;
  const auto groups = rank_groups(setup);
  const auto phase = largest_phase(setup, index);
  const auto cp = std::int64_t{role.mesh().cp()};
  const auto least = ceil_div(setup.longest_sequence, cp);
  const auto of_batch = ceil_div(
      setup.longest_sequence * std::max<std::int64_t>(role.memory.batch_size / role.mesh().dp(), 1),
      cp);
  auto most = std::max(open.most_tokens, least);
  if (role.trains && !setup.device.on_host)
    most = std::max(least, std::min(most, most_in_pipeline(role, of_batch)));
  auto wanted = std::min(most, std::max(least, setup.device.on_host ? most : kEnoughTokens));
  if (!of_tokens) {
    const MemoryAdvice advice(
        role.memory, role.engine,
        *std::ranges::find_if(
             groups, [&](const RankGroup& group) { return group.models[index].has_value(); })
             ->models[index],
        role.trains);
    wanted = advice.largest_batch(!role.trains).largest.tokens;
  }
  wanted = std::min(wanted, of_batch);
  auto chosen = role.engine.recompute();
  auto fits = fitting(setup, groups, phase, chosen);
  if (of_recompute) {
    const auto ways = ways_to_recompute(setup, index);
    const bool takes_fewer = of_tokens && !setup.device.on_host && role.model.num_moe_experts == 0;
    const auto fewer =
        takes_fewer ? std::min(wanted, std::max(least, kEnoughTokensOfAllLayers)) : wanted;
    auto found = ways.begin();
    if (fitting(setup, groups, phase, ways.front()) < fewer) {
      // More layers never keep more.
      found = std::partition_point(ways.begin() + 1, ways.end(), [&](const Recompute& way) {
        return fitting(setup, groups, phase, way) < wanted;
      });
      if (found == ways.end()) --found;
    }
    chosen = *found;
    fits = fitting(setup, groups, phase, chosen);
    set_recompute(*open.of_engine, chosen);
  }
  if (of_tokens) {
    const auto tokens = fits >= most ? most : std::max(least, fits / kTokenStep * kTokenStep);
    *open.tokens = static_cast<int>(tokens);
    said.push_back(fmt::format("{}={}", open.tokens_key, tokens));
  }
  if (of_recompute) std::ranges::move(words_of(open), std::back_inserter(said));
}

double cache_share(const RunSetup& setup) {
  double share = kMostCacheShare;
  for (const auto& group : rank_groups(setup)) {
    if (!group.rollout) continue;
    const auto room = rollout_room(setup, group);
    auto reserve = room.reserve;
    if (!setup.rollout->settings.free_cache_engine) {
      std::int64_t most = 0;
      for (const auto& phase : phases_of(setup)) {
        const auto bytes = bytes_of(setup, group, phase);
        if (phase.work != Phase::Work::kGenerate)
          most = std::max(most, bytes.activations + bytes.logits);
      }
      reserve += most;
    }
    share = std::min(share, static_cast<double>(room.free - reserve) /
                                static_cast<double>(std::max<std::int64_t>(room.free, 1)));
  }
  return std::floor(100 * std::max(share, kLeastCacheShare)) / 100;
}

EngineConfig& engine_of(SftConfig& config, Role) {
  return config.engine;
}
EngineConfig& engine_of(PpoConfig& config, Role role) {
  switch (role) {
    case Role::kActor:
      return config.actor.megatron;
    case Role::kRef:
      return config.ref.megatron;
    case Role::kCritic:
      return config.critic.megatron;
    case Role::kReward:
      return config.reward.megatron;
  }
  fail(ErrorKind::kBug, "a role without an engine");
}

// Chooses everything but what rests on the host.
Chosen<SftConfig> choose_others(const SftConfig& config,
                                const models::TransformerConfig& model,
                                int world_size,
                                const DeviceSpec& device) {
  Chosen<SftConfig> chosen{.config = config};
  auto& data = chosen.config.data;
  const auto cp = config.engine.parallel.context_parallel_size;
  const auto longest = ceil_div(std::int64_t{data.max_length}, std::int64_t{cp});
  choose(setup_of(config, model, world_size, device), 0,
         {.engine = "engine",
          .of_engine = &chosen.config.engine,
          .tokens_key = "data.max_token_len_per_gpu",
          .tokens = data.use_dynamic_bsz ? &data.max_token_len_per_gpu : nullptr,
          .most_tokens = device.on_host ? longest : MicroBatchSize::kUsual},
         chosen.settings);
  return chosen;
}

Chosen<PpoConfig> choose_others(const PpoConfig& config,
                                const ModelsOfRun& models,
                                int world_size,
                                const DeviceSpec& device) {
  Chosen<PpoConfig> chosen{.config = config};
  auto& c = chosen.config;
  const bool critic_has_its_own = config.critic_micro_batches() != config.actor_micro_batches() ||
                                  config.actor.ppo_max_token_len_per_gpu ||
                                  !config.actor.use_dynamic_bsz;
  const std::size_t num_roles = setup_of(config, models, world_size, device).roles.size();
  for (std::size_t i = 0; i < num_roles; ++i) {
    const auto setup = setup_of(c, models, world_size, device);  // with what is chosen already
    OpenSettings open{.engine = setup.roles[i].memory.engine,
                      .of_engine = &engine_of(c, setup.roles[i].role),
                      .most_tokens = MicroBatchSize::kUsual};
    switch (setup.roles[i].role) {
      case Role::kActor:
        open.tokens_key = kActorSection + ".ppo_max_token_len_per_gpu";
        if (c.actor.use_dynamic_bsz) open.tokens = &c.actor.ppo_max_token_len_per_gpu;
        break;
      case Role::kRef:
        continue;
      case Role::kCritic:
        open.tokens_key = "critic.ppo_max_token_len_per_gpu";
        if (!critic_has_its_own) open.tokens = &c.critic.ppo_max_token_len_per_gpu;
        break;
      case Role::kReward:
        open.tokens_key = "reward_model.max_token_len_per_gpu";
        if (c.reward.use_dynamic_bsz) open.tokens = &c.reward.max_token_len_per_gpu;
        break;
    }
    choose(setup, i, open, chosen.settings);
  }
  if (!config.rollout.gpu_memory_utilization && !device.on_host) {
    c.rollout.gpu_memory_utilization = cache_share(setup_of(c, models, world_size, device));
    chosen.settings.push_back(fmt::format("{}.gpu_memory_utilization={}", kRolloutSection,
                                          *c.rollout.gpu_memory_utilization));
  }
  return chosen;
}

template <typename Config, typename Models>
Chosen<Config> choose_all(const Config& config,
                          const Models& models,
                          int world_size,
                          const DeviceSpec& device,
                          std::span<const HostShare> hosts) {
  const auto setup = setup_of(config, models, world_size, device);
  const auto with = [&](std::span<const OffloadKey> rests) {
    auto decided = config;
    for (const auto& role : setup.roles) {
      auto& engine = engine_of(decided, role.role);
      for (auto* const value :
           {&engine.optimizer_offload, &engine.grad_offload, &engine.param_offload})
        value->emplace(value->value_or(false));
    }
    for (const auto& key : rests) engine_of(decided, setup.roles[key.role].role).*key.value = true;
    return choose_others(decided, models, world_size, device);
  };
  const auto offload = choose_offload(setup, hosts, [&](std::span<const OffloadKey> rests) {
    return plan_run(setup_of(with(rests).config, models, world_size, device));
  });
  auto chosen = with(offload.rests);
  std::vector<std::string> settings;
  for (const auto& key : offload.rests) settings.push_back(key.key + "=true");
  chosen.settings.insert(chosen.settings.begin(), settings.begin(), settings.end());
  chosen.offload = offload.reasons;
  return chosen;
}

}  // namespace

Chosen<SftConfig> choose_settings(const SftConfig& config,
                                  const models::TransformerConfig& model,
                                  int world_size,
                                  const DeviceSpec& device,
                                  std::span<const HostShare> hosts) {
  return choose_all(config, model, world_size, device, hosts);
}

Chosen<PpoConfig> choose_settings(const PpoConfig& config,
                                  const ModelsOfRun& models,
                                  int world_size,
                                  const DeviceSpec& device,
                                  std::span<const HostShare> hosts) {
  return choose_all(config, models, world_size, device, hosts);
}

}  // namespace ferry::trainer
