#include "trainer/workers/ppo_workers.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "models/device/device.h"
#include "models/device/memory_error.h"
#include "trainer/engine/run_options.h"
#include "trainer/workers/role.h"

namespace ferry::trainer {
namespace {

constexpr const char* kMeshOf = "/get_megatron_global_info";

// What is to be profiled of a rank: what any of its roles asks for.
ProfilerConfig profiled(const PpoConfig& config) {
  auto all = config.actor.profiler;
  if (config.use_critic() && config.critic.profiler.enable) {
    all.enable = true;
    all.all_ranks = all.all_ranks || config.critic.profiler.all_ranks;
    all.ranks.insert(all.ranks.end(), config.critic.profiler.ranks.begin(),
                     config.critic.profiler.ranks.end());
  }
  return all;
}

DataProto computed(const std::string& phase, const std::function<DataProto()>& method) {
  return models::or_out_of_memory(
      "in " + phase,
      "lower ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu; or set "
      "recompute_granularity, optimizer_offload, param_offload or grad_offload of a role",
      method);
}

}  // namespace

PpoWorkers::PpoWorkers(models::World& world,
                       const PpoConfig& config,
                       std::shared_ptr<const converter::Checkpoint> origin,
                       const PromptEncoder& encoder,
                       std::int64_t total_steps)
    : world_(world),
      config_(config),
      group_(world, std::chrono::seconds(config.trainer.worker_timeout)),
      reward_(config_, encoder),
      profiler_(config.global_profiler, profiled(config), world.rank()) {
  policy_ = std::make_unique<ActorRolloutRefWorker>(world, config, origin, total_steps);
  if (config.use_critic() && has_role(config.critic.ranks, world.rank()))
    critic_ = std::make_unique<CriticWorker>(
        world, config,
        config.critic.model.path.empty() ? origin : open_checkpoint(config.critic.model),
        total_steps);
  if (config.reward.enable && has_role(config.reward.ranks, world.rank()))
    reward_model_ =
        std::make_unique<RewardModelWorker>(world, config, open_checkpoint(config.reward.model));
  models::or_out_of_memory("making the rollout", "set param_offload or grad_offload of a role",
                           [&] { policy_->init_rollout(encoder.eos_token_ids()); });
  add_roles();
}

PpoWorkers::~PpoWorkers() = default;

void PpoWorkers::add(const std::string& name,
                     const std::string& phase,
                     const Dispatch& dispatch,
                     WorkerGroup::Method method) {
  group_.add(name, dispatch, [this, phase, method = std::move(method)](const DataProto& data) {
    enter_step(data.meta_info.value("global_step", step_));
    std::optional<Timeline::Scope> span;
    if (timeline_) span.emplace(*timeline_, phase);
    profiler_.begin_task(step_, phase);
    auto answer = computed(phase, [&] { return method(data); });
    if (timeline_) models::synchronize(world_.device());
    profiler_.end_task();
    return answer;
  });
}

void PpoWorkers::add_mesh(const std::string& role, const models::ParallelState* mesh) {
  auto dispatch = one_to_all(world_);
  dispatch.takes_part = mesh != nullptr;
  group_.add(role + kMeshOf, dispatch, [mesh](const DataProto&) {
    DataProto answer;
    answer.meta_info = {{"ranks", mesh->all().ranks()}, {"info", get_megatron_global_info(*mesh)}};
    return answer;
  });
  roles_.push_back(role);
}

std::vector<RoleMesh> PpoWorkers::meshes() {
  std::vector<RoleMesh> meshes;
  for (const auto& role : roles_) {
    const auto answer = group_.call(role + kMeshOf).meta_info;
    meshes.push_back({.name = role, .ranks = answer.at("ranks"), .info = answer.at("info")});
  }
  return meshes;
}

void PpoWorkers::add_roles() {
  auto& policy = *policy_;
  const auto mesh_of = [](const MegatronWorker* worker) {
    return worker == nullptr ? nullptr : &worker->engine().mesh();
  };
  add_mesh("actor", mesh_of(policy.actor()));
  add_mesh("rollout", policy.rollout_mesh());
  if (config_.use_reference_policy()) add_mesh("ref", mesh_of(policy.ref()));
  if (config_.use_critic()) add_mesh("critic", mesh_of(critic_.get()));
  if (config_.reward.enable) add_mesh("reward", mesh_of(reward_model_.get()));
  const auto of = [](auto& worker, auto method) {
    return [&worker, method](const DataProto& data) { return (worker.*method)(data); };
  };
  using Policy = ActorRolloutRefWorker;
  add("generate_sequences", "gen", policy.rollout_dispatch(),
      of(policy, &Policy::generate_sequences));
  add("compute_log_prob", "old_log_prob", policy.actor_dispatch(),
      of(policy, &Policy::compute_log_prob));
  add("update_actor", "update_actor", policy.actor_dispatch(), of(policy, &Policy::update_actor));
  if (config_.use_reference_policy())
    add("compute_ref_log_prob", "ref", policy.ref_dispatch(),
        of(policy, &Policy::compute_ref_log_prob));
  const auto all = one_to_all(world_);
  add("update_weights", "update_weights", all, of(policy, &Policy::update_weights));
  add("sleep_rollout", "sleep", all, of(policy, &Policy::sleep_rollout));
  const auto add_checkpoints = [&](const std::string& role, MegatronWorker* worker) {
    auto dispatch = all;
    dispatch.takes_part = worker != nullptr;
    const auto method = [worker](auto one) {
      return [worker, one](const DataProto& call) { return (worker->*one)(call); };
    };
    add(role + "/save_checkpoint", "save_checkpoint", dispatch,
        method(&MegatronWorker::save_checkpoint));
    add(role + "/load_checkpoint", "load_checkpoint", dispatch,
        method(&MegatronWorker::load_checkpoint));
    add(role + "/finish_save", "save_checkpoint", dispatch, method(&MegatronWorker::finish_save));
  };
  add_checkpoints("actor", policy.actor());
  if (config_.use_critic()) {
    const auto dispatch = critic_ ? critic_->dispatch() : Dispatch::none();
    add("compute_values", "values", dispatch,
        [this](const DataProto& data) { return critic_->compute_values(data); });
    add("update_critic", "update_critic", dispatch,
        [this](const DataProto& data) { return critic_->update_critic(data); });
    add_checkpoints("critic", critic_.get());
  }
  if (config_.reward.enable)
    add("compute_rm_score", "reward", reward_model_ ? reward_model_->dispatch() : Dispatch::none(),
        [this](const DataProto& data) { return reward_model_->compute_rm_score(data); });
  // A program is started once, and asked by one. One step off other ranks may be answering.
  const bool by_one = !config_.reward.command.empty() || config_.trainer.one_step_off;
  add("compute_reward", "reward", by_one ? rank_zero(world_) : dp_compute_proto(world_),
      [this](const DataProto& data) { return reward_.compute_reward(data); });
}

void PpoWorkers::begin_timeline(const std::filesystem::path& folder, std::int64_t first_step) {
  if (world_.rank() != 0) timeline_ = std::make_unique<Timeline>(folder, world_.rank(), first_step);
}

void PpoWorkers::enter_step(std::int64_t step) {
  if (step == step_) return;
  profiler_.end_step(step_);
  models::reset_peak_memory(world_.device());
  if (timeline_) {
    if (step_ > 0) (void)timeline_->end_step();
    timeline_->begin_step(step);
  }
  step_ = step;
  profiler_.begin_step(step_);
}

void PpoWorkers::serve() {
  group_.serve();
  profiler_.end_step(step_);
  if (timeline_) (void)timeline_->end_step();
}

}  // namespace ferry::trainer
