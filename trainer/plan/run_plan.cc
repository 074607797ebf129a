#include "trainer/plan/run_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "trainer/config/ppo_rules.h"
#include "trainer/plan/phase_seconds.h"

namespace ferry::trainer {
namespace {

using distckpt::ceil_div;
using Work = Phase::Work;

constexpr std::int64_t kMiB = 1 << 20;
// Allowances for what CUDA, cuBLAS and NCCL keep for themselves: not measured here.
constexpr std::int64_t kContext = 1024 * kMiB;
constexpr std::int64_t kCommunicator = 256 * kMiB;  // for each axis that ranks share
constexpr double kUsualCacheShare = 0.5;            // beside an actor that trains beside the cache

int place_of(const std::vector<int>& ranks, int rank) {
  const auto found = std::ranges::find(ranks, rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

// The rollout computes with the actor's alignment and dtype.
ModelOnRank rollout_model(const RunSetup& setup) {
  auto engine = setup.roles.front().engine;
  engine.parallel = setup.rollout->parallel;
  engine.sequence_parallel = false;
  engine.recompute_granularity.reset();
  return {setup.roles.front().model, engine, setup.rollout->mesh(), {}, {}, setup.device.on_host};
}

// A replica is one process with all of the model.
ModelOnRank replica_model(RunSetup setup) {
  auto& parallel = setup.rollout->parallel;
  parallel.tensor_model_parallel_size = parallel.expert_model_parallel_size = 1;
  parallel.expert_tensor_parallel_size.reset();
  setup.rollout->ranks.resize(1);
  return rollout_model(setup);
}

// True if a rank of the rollout, by its place among them, is the first that answers its prompts.
bool has_replicas(const RolloutSetup& rollout, int place) {
  return rollout.settings.replicas.enabled() && place >= 0 &&
         place % rollout.parallel.tensor_model_parallel_size == 0;
}

// The replicas on a rank's device, where all ranks are on one machine.
int num_replicas_on(const RunSetup& setup, int rank) {
  if (!setup.rollout || setup.device.on_host) return 0;
  const auto& rollout = *setup.rollout;
  const auto& replicas = rollout.settings.replicas;
  const auto first = std::ssize(rollout.ranks) / rollout.parallel.tensor_model_parallel_size;
  int count = 0;
  for (std::int64_t i = 0; i < first * replicas.num && !replicas.devices.empty(); ++i)
    count +=
        replicas.devices[static_cast<std::size_t>(i) % replicas.devices.size()] == rank ? 1 : 0;
  return count;
}

// The most that a step of the rollout takes beside weights and cache.
std::int64_t rollout_step_bytes(const RunSetup& setup, const ModelOnRank& model) {
  const auto& settings = setup.rollout->settings;
  constexpr std::int64_t kOfADraw = 3 * sizeof(float);  // probabilities, sorted, and their sums
  const auto rows = std::int64_t{settings.max_num_batched_tokens};
  const auto sequences = std::int64_t{settings.max_num_seqs};
  const auto chunk = model.chunks().front();
  return static_cast<std::int64_t>(models::activation_bytes(chunk, kForwardOnly, 0).passing *
                                   static_cast<double>(rows)) +
         models::gathered_bytes(model.config(), model.mesh().tp(), model.layout(),
                                models::max_gathered_keys(setup.longest_sequence, rows)) +
         sequences * model.config().vocab_size * (size_of(model.layout().dtype) + kOfADraw);
}

// All that a replica has: on the host, or on a GPU that it shares with a rank.
std::int64_t replica_bytes(const RunSetup& setup, const ModelOnRank& model) {
  const auto& settings = setup.rollout->settings;
  const auto always =
      model.memory(false).parameters + model.vision_bytes() + settings.kv_cache_bytes;
  return setup.device.on_host ? always : always + kContext + rollout_step_bytes(setup, model);
}

// CUDA's and NCCL's own.
std::int64_t context_bytes(const RunSetup& setup, const RankGroup& group) {
  if (setup.device.on_host) return 0;
  auto bytes = kContext;
  const auto add = [&](const std::optional<ModelOnRank>& model) {
    if (!model) return;
    const auto& mesh = model->mesh();
    for (const int size : {mesh.tp(), mesh.cp(), mesh.dp(), mesh.pp(), mesh.ep()})
      bytes += size > 1 ? kCommunicator : 0;
  };
  for (const auto& model : group.models) add(model);
  add(group.rollout);
  return bytes;
}

// True while the rollout has the device: what the actor may keep on the host is there.
bool actor_rests(const RunSetup& setup, const Phase& phase) {
  return setup.rollout && phase.work == Work::kGenerate;
}

bool is_colocated(const RunSetup& setup, const RankGroup& group) {
  return group.models.front().has_value() && setup.rollout.has_value();
}

// The parts of a role on a rank: on the device, or resting on the host.
void add_role(PhaseBytes& bytes,
              const RunSetup& setup,
              std::size_t index,
              const ModelOnRank& model,
              const Phase& phase) {
  const auto& role = setup.roles[index];
  const auto memory = model.memory(role.trains);
  const auto& engine = role.engine;
  const bool computes = phase.role == index && phase.work != Work::kGenerate;
  const bool learns = computes && (phase.work == Work::kLearn || phase.work == Work::kStep);
  const bool actor = index == 0;
  const auto add = [&](std::int64_t PhaseBytes::*part, std::int64_t size, bool rests) {
    (rests ? bytes.host : bytes.*part) += size;
  };
  // A tower that is frozen never rests.
  bytes.weights += model.vision_bytes();
  const bool copied = setup.rollout && !setup.rollout->shares_memory;
  add(&PhaseBytes::weights, memory.parameters,
      engine.param_offload.value_or(false) &&
          (actor ? copied && actor_rests(setup, phase) : !computes));
  // Gradients come back as zeros: the host keeps none of them. The actor's go before the cache and
  // its weights come.
  const bool without_gradients = engine.grad_offload.value_or(false) &&
                                 (actor ? actor_rests(setup, phase) || phase.work == Work::kReshard
                                        : setup.rollout && !learns);
  if (!without_gradients) bytes.gradients += memory.gradients;
  const bool steps = computes && phase.work == Work::kStep;
  if (memory.on_host == 0 || steps) bytes.optimizer += memory.optimizer;
  bytes.host += memory.on_host;
}

// Processes that answer beside the rank, the copy of the weights on the host that they read, and
// the whole model that it is made of where ranks share theirs.
void add_replicas(PhaseBytes& bytes, const RunSetup& setup, const RankGroup& group) {
  if (!group.replica) return;
  const bool on_host = setup.device.on_host;
  const auto& settings = setup.rollout->settings;
  const auto parameters = group.replica->memory(false).parameters;
  if (group.has_replicas) {
    (on_host ? bytes.replicas : bytes.host) += parameters;
    if (settings.shares_model()) bytes.weights += parameters;
  }
  const int here = !on_host             ? group.num_replicas_here
                   : group.has_replicas ? settings.replicas.num
                                        : 0;
  bytes.replicas += here * replica_bytes(setup, *group.replica);
}

// The rollout's own weights and cache, where they are.
void add_rollout(PhaseBytes& bytes,
                 const RunSetup& setup,
                 const RankGroup& group,
                 const Phase& phase) {
  if (!group.rollout) return;
  bytes.weights += group.rollout->vision_bytes();
  const auto& rollout = *setup.rollout;
  const bool alone = !group.models.front();
  const bool awake = phase.work == Work::kGenerate || phase.work == Work::kReshard || alone ||
                     !rollout.settings.free_cache_engine;
  const bool sleeps_with_weights = rollout.settings.update_weights_delta != models::Delta::kOff;
  if (!rollout.shares_memory && (awake || sleeps_with_weights))
    bytes.weights += group.rollout->memory(false).parameters;
  if (!awake) return;
  if (setup.device.on_host) {
    bytes.kv_cache += rollout.settings.kv_cache_bytes;
    return;
  }
  const auto room = rollout_room(setup, group);
  const auto share = rollout.settings.gpu_memory_utilization.value_or(kUsualCacheShare);
  const auto given = static_cast<std::int64_t>(share * static_cast<double>(room.free)) - room.step;
  bytes.kv_cache += std::clamp<std::int64_t>(given, 0, room.useful);
}

std::string describe(const RoleSetup& role, const ModelOnRank& model) {
  return model.mesh().pp() == 1 ? name_of(role.role)
                                : fmt::format("{}, stage {} of {}", name_of(role.role),
                                              model.at().pp + 1, model.mesh().pp());
}

// Bytes of a rank's cache that hold states of linear attention.
std::int64_t state_bytes(const RolloutSetup& rollout, const ModelOnRank& model) {
  const auto& settings = rollout.settings;
  return models::linear_state_slots(
             model.config(), settings.max_num_seqs,
             settings.enable_prefix_caching && settings.enable_chunked_prefill)
             .total() *
         models::linear_state_bytes(model.config(), model.mesh().tp(), model.layout(),
                                    model.on_host());
}

// The bytes that a sequence needs of a rank's cache.
std::int64_t sequence_bytes(const RunSetup& setup, const ModelOnRank& model) {
  return state_bytes(*setup.rollout, model) +
         setup.longest_sequence *
             models::key_value_bytes(model.config(), model.mesh().tp(), model.layout());
}

// True if a rank generates, and its cache has no room for a sequence.
bool starves(const RunSetup& setup,
             const RankGroup& group,
             const Phase& phase,
             const PhaseBytes& bytes) {
  if (phase.work != Work::kGenerate || !group.rollout) return false;
  return bytes.kv_cache < sequence_bytes(setup, *group.rollout);
}

// The offloads of a rank's roles that would make room in a phase, unless all of them together make
// less than it lacks.
std::vector<std::string> offload_ways(const RunSetup& setup,
                                      const RankGroup& group,
                                      const Phase& phase,
                                      std::int64_t lacking) {
  std::vector<std::string> ways;
  std::int64_t room = 0;
  const auto offer = [&](const std::string& section, std::string_view key, std::int64_t bytes) {
    ways.push_back(fmt::format("{}.{}=true, for {}", section, key, in_words(bytes)));
    room += bytes;
  };
  const bool generates = phase.work == Work::kGenerate || phase.work == Work::kReshard;
  for (std::size_t i = 0; i < setup.roles.size(); ++i) {
    if (!group.models[i]) continue;
    const auto of = group.models[i]->memory(setup.roles[i].trains);
    const auto& engine = setup.roles[i].engine;
    const auto& section = setup.roles[i].memory.engine;
    const bool actor = setup.roles[i].role == Role::kActor;
    if (!engine.optimizer_offload.value_or(false) && of.optimizer > 0 && phase.work != Work::kStep)
      offer(section, "optimizer_offload", of.optimizer);
    if (setup.rollout && !engine.grad_offload.value_or(false) && of.gradients > 0 && generates)
      offer(section, "grad_offload", of.gradients);
    // The rollout computes with the parameters of an actor whose memory it shares.
    const bool rests =
        actor ? phase.work == Work::kGenerate && !setup.rollout->shares_memory : phase.role != i;
    if (setup.rollout && !engine.param_offload.value_or(false) && rests)
      offer(section, "param_offload", of.parameters);
  }
  return room < lacking ? std::vector<std::string>() : ways;
}

// The keys that share the model of a phase out over more ranks.
std::string more_ranks(const RunSetup& setup, const Phase& phase) {
  const auto& role = setup.roles[phase.role];
  auto of_role =
      fmt::format("more ranks for the model ({})", sharing_keys(role.memory.engine, role.model));
  if (phase.work != Work::kGenerate && phase.work != Work::kReshard) return of_role;
  const auto of_rollout = fmt::format(
      "{}{}.tensor_model_parallel_size",
      role.model.num_moe_experts > 0 ? fmt::format("{}.expert_parallel_size, ", kRolloutSection)
                                     : "",
      kRolloutSection);
  return setup.rollout->shares_memory
             ? fmt::format("{}, and as many for the rollout ({})", of_role, of_rollout)
             : fmt::format("more ranks for the rollout ({}); or {}", of_rollout, of_role);
}

// Says what is missing in a phase on ranks, and the settings that would do.
std::string misfit(const RunSetup& setup,
                   const RankGroup& group,
                   const Phase& phase,
                   const PhaseBytes& bytes,
                   std::int64_t memory) {
  const bool hungry = starves(setup, group, phase, bytes);
  const auto what =
      hungry ? fmt::format("{} has {} for the cache on {}, and a sequence needs more", phase.name,
                           in_words(bytes.kv_cache), in_words(group.ranks))
             : fmt::format("{} needs {} on {}, of {}", phase.name, in_words(bytes.on_device()),
                           in_words(group.ranks), in_words(memory));
  const auto& model = group.models[phase.role];
  const auto& role = setup.roles[phase.role];
  std::vector<std::string> ways;
  const auto resting = resting_bytes(setup, group, phase).on_device();
  if ((phase.work == Work::kForward || phase.work == Work::kLearn) && model && resting < memory) {
    const MemoryAdvice advice(role.memory, role.engine, *model, role.trains);
    const bool forward_only = phase.work == Work::kForward;
    ways.push_back(advice.ways(advice.largest_batch(forward_only), forward_only, memory - resting));
  } else {
    const auto needed = hungry ? sequence_bytes(setup, *group.rollout) - bytes.kv_cache : 0;
    ways = offload_ways(setup, group, phase, bytes.on_device() + needed - memory);
    ways.push_back(more_ranks(setup, phase));
  }
  return fmt::format("{}: {}", what, fmt::join(ways, "; or "));
}

}  // namespace

std::int64_t RunPlan::most_bytes(int rank, std::int64_t PhaseBytes::*part) const {
  std::int64_t most = 0;
  for (const auto& group : ranks) {
    if (std::ranges::find(group.ranks, rank) == group.ranks.end()) continue;
    for (const auto& phase : group.phases) most = std::max(most, phase.bytes.*part);
  }
  return most;
}

double RunPlan::step_seconds() const {
  double sum = 0;
  for (const auto& phase : seconds) sum += phase.seconds;
  return sum;
}

std::optional<std::string> replica_misfit(const RunSetup& setup, const RunPlan& plan) {
  if (!setup.rollout || setup.device.on_host || setup.rollout->settings.replicas.num == 0)
    return std::nullopt;
  const auto model = replica_model(setup);
  const auto bytes = kContext + model.memory(false).parameters + model.vision_bytes() +
                     rollout_step_bytes(setup, model) +
                     setup.longest_sequence *
                         models::key_value_bytes(model.config(), model.mesh().tp(), model.layout());
  if (bytes <= plan.memory) return std::nullopt;
  return fmt::format("a replica, which has the whole model, needs {} of {}", in_words(bytes),
                     in_words(plan.memory));
}

std::vector<RankGroup> rank_groups(const RunSetup& setup) {
  std::map<std::vector<int>, RankGroup> groups;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    std::vector<int> parts;
    for (const auto& role : setup.roles) {
      const auto place = place_of(role.ranks, rank);
      parts.push_back(place < 0 ? -1 : role.mesh().coordinates(place).pp);
    }
    const int place = setup.rollout ? place_of(setup.rollout->ranks, rank) : -1;
    const bool has_some = setup.rollout && has_replicas(*setup.rollout, place);
    const int num_here = num_replicas_on(setup, rank);
    parts.insert(parts.end(), {std::min(place, 0), has_some ? 1 : 0, num_here});
    auto& group = groups[parts];
    group.ranks.push_back(rank);
    if (!group.models.empty()) continue;
    for (const auto& role : setup.roles) {
      const auto in_role = place_of(role.ranks, rank);
      group.models.push_back(
          in_role < 0 ? std::nullopt
                      : std::optional(ModelOnRank(role.model, role.engine, role.mesh(),
                                                  role.mesh().coordinates(in_role),
                                                  role.memory.dtypes, setup.device.on_host)));
    }
    if (place >= 0) group.rollout = rollout_model(setup);
    if (has_some || num_here > 0) group.replica = replica_model(setup);
    group.has_replicas = has_some;
    group.num_replicas_here = num_here;
  }
  std::vector<RankGroup> all;
  for (auto& [parts, group] : groups) all.push_back(std::move(group));
  std::ranges::sort(all, {}, [](const RankGroup& group) { return group.ranks.front(); });
  return all;
}

std::vector<Phase> phases_of(const RunSetup& setup) {
  if (!setup.rollout) {
    std::vector<Phase> phases{{"forward_backward", Work::kLearn}, {"optimizer", Work::kStep}};
    if (setup.saves) phases.push_back({"save_checkpoint", Work::kSave});
    return phases;
  }
  const auto& roles = setup.roles;
  std::vector<Phase> phases{{"update_weights", Work::kReshard}, {"gen", Work::kGenerate}};
  const auto add = [&](Role role, const char* name, Work work) {
    for (std::size_t i = 0; i < roles.size(); ++i) {
      if (roles[i].role == role) phases.push_back({name, work, i});
    }
  };
  add(Role::kReward, "reward", Work::kForward);
  if (setup.rollout->computes_old_log_prob) add(Role::kActor, "old_log_prob", Work::kForward);
  add(Role::kRef, "ref", Work::kForward);
  add(Role::kCritic, "values", Work::kForward);
  add(Role::kCritic, "update_critic", Work::kLearn);
  add(Role::kActor, "update_actor", Work::kLearn);
  if (setup.saves) add(Role::kActor, "save_checkpoint", Work::kSave);
  return phases;
}

BatchBytes largest_batch(const RoleSetup& role, const ModelOnRank& model, bool forward_only) {
  const auto batch =
      MemoryAdvice(role.memory, role.engine, model, role.trains).largest_batch(forward_only);
  return batch_bytes(model, forward_only ? kForwardOnly : model.recompute(), batch.largest,
                     batch.num_micro_batches);
}

RolloutRoom rollout_room(const RunSetup& setup, const RankGroup& group) {
  const auto& rollout = *setup.rollout;
  const auto& model = *group.rollout;
  const auto& settings = rollout.settings;
  // The cache is made when all roles have their memory.
  const Phase before{"", Work::kGenerate};
  PhaseBytes held;
  for (std::size_t i = 0; i < setup.roles.size(); ++i) {
    if (group.models[i]) add_role(held, setup, i, *group.models[i], before);
  }
  if (is_colocated(setup, group) && !rollout.shares_memory &&
      setup.roles.front().engine.param_offload.value_or(false))
    held.weights += group.models.front()->memory(false).parameters;
  if (!rollout.shares_memory) held.weights += model.memory(false).parameters;
  held.weights += model.vision_bytes();
  held.context = context_bytes(setup, group);

  const auto& config = model.config();
  const auto sequences = std::int64_t{settings.max_num_seqs};
  RolloutRoom room;
  room.free = std::max<std::int64_t>(setup.device.memory - held.on_device(), 0);
  room.step = rollout_step_bytes(setup, model);
  PhaseBytes later;  // that replicas take when the cache is there
  add_replicas(later, setup, group);
  const bool reshards = !rollout.shares_memory;
  room.reserve = setup.device.memory - usable(setup.device.memory, setup.device.on_host) +
                 later.on_device() +
                 (reshards ? 2 * (settings.update_weights_bucket_megabytes * kMiB) : 0);
  room.useful = (sequences * ceil_div(setup.longest_sequence, models::kCacheBlockTokens) + 1) *
                    models::kCacheBlockTokens *
                    models::key_value_bytes(config, model.mesh().tp(), model.layout()) +
                state_bytes(rollout, model);
  return room;
}

PhaseBytes resting_bytes(const RunSetup& setup, const RankGroup& group, const Phase& phase) {
  PhaseBytes bytes;
  for (std::size_t i = 0; i < setup.roles.size(); ++i) {
    if (group.models[i]) add_role(bytes, setup, i, *group.models[i], phase);
  }
  add_rollout(bytes, setup, group, phase);
  add_replicas(bytes, setup, group);
  bytes.context = context_bytes(setup, group);
  return bytes;
}

PhaseBytes bytes_of(const RunSetup& setup, const RankGroup& group, const Phase& phase) {
  auto bytes = resting_bytes(setup, group, phase);
  const auto& model = group.models[phase.role];
  const auto& role = setup.roles[phase.role];
  if (phase.work == Work::kForward || phase.work == Work::kLearn) {
    if (!model) return bytes;
    const auto batch = largest_batch(role, *model, phase.work == Work::kForward);
    bytes.activations = batch.activations;
    bytes.logits = batch.logits;
    // The update at the end of the passes of reinforcement learning.
    if (phase.work == Work::kLearn && setup.rollout) {
      const auto step = resting_bytes(setup, group, {phase.name, Work::kStep, phase.role});
      if (step.on_device() > bytes.on_device()) return step;
    }
  } else if (phase.work == Work::kGenerate && group.rollout && !setup.device.on_host) {
    bytes.activations = rollout_room(setup, group).step;
  } else if (phase.work == Work::kReshard && !setup.rollout->shares_memory) {
    const auto& settings = setup.rollout->settings;
    bytes.staging = 2 * (settings.update_weights_bucket_megabytes * kMiB);
  } else if (phase.work == Work::kSave && setup.async_save && model) {
    const auto memory = model->memory(true);
    bytes.host += memory.parameters + std::max(memory.optimizer, memory.on_host);
  }
  return bytes;
}

RunPlan plan_run(const RunSetup& setup) {
  RunPlan plan{.memory = usable(setup.device.memory, setup.device.on_host),
               .tokens = setup.sequences * setup.longest_sequence};
  const auto phases = phases_of(setup);
  for (const auto& group : rank_groups(setup)) {
    RankPlan ranks{.ranks = group.ranks};
    for (std::size_t i = 0; i < setup.roles.size(); ++i) {
      if (group.models[i]) ranks.parts.push_back(describe(setup.roles[i], *group.models[i]));
    }
    if (group.rollout) ranks.parts.emplace_back("rollout");
    for (const auto& phase : phases) {
      const auto bytes = bytes_of(setup, group, phase);
      if (bytes.on_device() > plan.memory || starves(setup, group, phase, bytes))
        plan.misfits.push_back(misfit(setup, group, phase, bytes, plan.memory));
      ranks.phases.push_back({phase.name, bytes});
    }
    plan.ranks.push_back(std::move(ranks));
  }
  if (setup.device.flops > 0 && plan.fits()) plan.seconds = phase_seconds(setup, phases);
  return plan;
}

}  // namespace ferry::trainer
