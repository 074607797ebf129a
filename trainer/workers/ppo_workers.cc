#include "trainer/workers/ppo_workers.h"

#include <ATen/ops/arange.h>

#include <chrono>
#include <optional>
#include <utility>

#include "models/device/device.h"
#include "trainer/data/permutation.h"
#include "trainer/engine/run_options.h"
#include "trainer/update/rollout_columns.h"
#include "trainer/workers/role.h"

namespace ferry::trainer {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Sampling,
                                   temperature,
                                   top_k,
                                   top_p,
                                   entropy,
                                   sampling_mask,
                                   routed_experts,
                                   num_groups,
                                   learned_at,
                                   must_finish)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PeakMemory, allocated, reserved)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(UpdateOutput, metrics, not_finite, loss_scale, max_memory)

namespace {

// A rank profiles all that any of its roles asks for.
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

// An answer without rows. (Its batch is an aggregate, which GCC 12 would free twice if a member
// initializer behind it threw: so the numbers are there before the answer is.)
WorkerData numbers_alone(nlohmann::json meta_info) {
  WorkerData answer;
  answer.meta_info = std::move(meta_info);
  return answer;
}

// A worker's method that maps rows to rows; it may be null where the rank takes no part.
template <typename Worker>
WorkerGroup::Method of_rows(Worker* worker, RolloutBatch (Worker::*method)(const RolloutBatch&)) {
  return [=](const WorkerData& call) {
    WorkerData answer;
    answer.batch = (worker->*method)(call.batch);
    return answer;
  };
}

std::int64_t step_of(const WorkerData& call) {
  return call.meta_info.at("global_step").get<std::int64_t>();
}

}  // namespace

PpoWorkers::PpoWorkers(models::World& world,
                       const PpoConfig& config,
                       const std::shared_ptr<const converter::Checkpoint>& origin,
                       const PromptEncoder& encoder,
                       const Tools& tools,
                       std::int64_t total_steps)
    : world_(world),
      config_(config),
      group_(world, std::chrono::seconds(config.trainer.worker_timeout)),
      reward_(config_, encoder),
      profiler_(config.global_profiler, profiled(config), world.rank()),
      memory_(config_.rollout, world) {
  const auto of = [](const MegatronWorker* role) {
    return role == nullptr ? nullptr : &role->engine();
  };
  policy_ = std::make_unique<ActorRolloutRefWorker>(world, config, origin, total_steps);
  memory_.add(of(policy_->actor()));
  memory_.add(of(policy_->ref()));
  if (config.use_critic() && has_role(config.critic.ranks, world.rank()))
    critic_ = std::make_unique<CriticWorker>(
        world, config,
        config.critic.model.path.empty() ? origin : open_checkpoint(config.critic.model),
        total_steps);
  if (config.reward.enable && has_role(config.reward.ranks, world.rank()))
    reward_model_ =
        std::make_unique<RewardModelWorker>(world, config, open_checkpoint(config.reward.model));
  if (critic_) critic_->see(encoder);
  if (reward_model_) reward_model_->see(encoder);
  memory_.add(of(critic_.get()));
  memory_.add(of(reward_model_.get()));
  memory_.run({.name = "the rollout"}, [&] {
    policy_->init_rollout(encoder, tools, config.reward.scores_early() ? &reward_ : nullptr);
  });
  add_roles();
}

PpoWorkers::~PpoWorkers() = default;

void PpoWorkers::add(const std::string& name,
                     const StepPhase& phase,
                     const Dispatch& dispatch,
                     WorkerGroup::Method method) {
  group_.add(name, dispatch, [this, phase, method = std::move(method)](const WorkerData& call) {
    enter_step(call.meta_info.value("global_step", step_));
    std::optional<Timeline::Scope> span;
    if (timeline_) span.emplace(*timeline_, phase.name);
    profiler_.begin_task(step_, phase.name);
    WorkerData answer;
    memory_.run(phase, [&] { answer = method(call); });
    if (timeline_) models::synchronize(world_.device());
    profiler_.end_task();
    return answer;
  });
}

void PpoWorkers::add_checkpoints(const std::string& role, MegatronWorker* worker) {
  auto dispatch = one_to_all(world_);
  dispatch.takes_part = worker != nullptr;
  using Texts = std::map<std::string, std::string>;
  add(role + "/save_checkpoint", {"save_checkpoint"}, dispatch, [worker](const WorkerData& call) {
    worker->save_checkpoint(step_of(call), call.meta_info.at("caller").get<Texts>(),
                            call.meta_info.at("async"));
    return WorkerData();
  });
  add(role + "/load_checkpoint", {"load_checkpoint"}, dispatch, [worker](const WorkerData& call) {
    return numbers_alone(worker->load_checkpoint(step_of(call), call.meta_info.at("root")));
  });
  add(role + "/finish_save", {"save_checkpoint"}, dispatch, [worker](const WorkerData& call) {
    return numbers_alone(worker->finish_save(call.meta_info.at("wait")));
  });
}

void PpoWorkers::add_roles() {
  auto& policy = *policy_;
  add("generate_sequences", {"gen"}, policy.rollout_dispatch(),
      [this, &policy](const WorkerData& call) {
        WorkerData answer;
        answer.batch = policy.generate_sequences(call.batch, call.meta_info.at("sampling"));
        for (auto& span : policy.take_spans())
          if (timeline_)
            timeline_->add(std::move(span.name), span.start, span.end);
          else
            spans_.push_back(std::move(span));
        return answer;
      });
  add("compute_log_prob", {"old_log_prob", Role::kActor}, policy.actor_dispatch(),
      of_rows(&policy, &ActorRolloutRefWorker::compute_log_prob));
  if (config_.is_async()) {
    add("keep_rows", {"gen"}, policy.actor_dispatch(), [](const WorkerData& call) { return call; });
    add("gather_rows", {"save_checkpoint"}, rank_zero(world_), [this](const WorkerData& call) {
      gathered_ = call.batch;
      return WorkerData();
    });
    add("carried_sessions", {"save_checkpoint"}, policy.rollout_dispatch(),
        [&policy](const WorkerData&) {
          WorkerData answer;
          answer.batch = policy.carried_sessions();
          return answer;
        });
    add("carry_sessions", {"load_checkpoint"}, policy.rollout_dispatch(),
        [&policy](const WorkerData& call) {
          policy.carry_sessions(call.batch);
          return WorkerData();
        });
  }
  add("update_actor", {"update_actor", Role::kActor}, policy.actor_dispatch(),
      [&policy](const WorkerData& call) {
        return numbers_alone(policy.update_actor(call.batch, step_of(call)));
      });
  if (config_.use_reference_policy())
    add("compute_ref_log_prob", {"ref", Role::kRef}, policy.ref_dispatch(),
        of_rows(&policy, &ActorRolloutRefWorker::compute_ref_log_prob));
  add("update_weights", {"update_weights"}, one_to_all(world_), [&policy](const WorkerData& call) {
    policy.update_weights(call.meta_info.at("weights_step"));
    return WorkerData();
  });
  add("sleep_rollout", {"sleep"}, one_to_all(world_), [&policy](const WorkerData&) {
    policy.sleep_rollout();
    return WorkerData();
  });
  add_checkpoints("actor", policy.actor());
  if (config_.use_critic()) {
    const auto dispatch = critic_ ? critic_->dispatch() : Dispatch::none();
    add("compute_values", {"values", Role::kCritic}, dispatch,
        of_rows(critic_.get(), &CriticWorker::compute_values));
    add("update_critic", {"update_critic", Role::kCritic}, dispatch,
        [this](const WorkerData& call) {
          return numbers_alone(critic_->update_critic(call.batch));
        });
    add_checkpoints("critic", critic_.get());
  }
  if (config_.reward.enable)
    add("compute_rm_score", {"reward", Role::kReward},
        reward_model_ ? reward_model_->dispatch() : Dispatch::none(),
        of_rows(reward_model_.get(), &RewardModelWorker::compute_rm_score));
  // A program is started once, and asked by one. Other ranks may be answering ahead.
  const bool by_one = !config_.reward.command.empty() || config_.is_async();
  add("compute_reward", {"reward"}, by_one ? rank_zero(world_) : dp_compute_proto(world_),
      of_rows(&reward_, &RewardManager::compute_reward));
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

// ------------------------------------------------------------------------------ calls, on rank 0

RowsOfRanks PpoWorkers::rows_of_ranks(const std::string& method,
                                      const RolloutBatch& batch,
                                      const RolloutBatch::Rows& order,
                                      std::int64_t mini_batch) const {
  const auto dp = group_.num_parts(method);
  if (dp > 0 && mini_batch % dp == 0)
    return mini_batches_of_ranks(batch, order, mini_batch, dp, config_.trainer.balance_batch);
  return even_rows(batch.size(), dp);
}

WorkerData PpoWorkers::ask(const std::string& method,
                           RolloutBatch batch,
                           RowsOfRanks rows,
                           nlohmann::json meta_info) {
  meta_info["global_step"] = called_step_;
  WorkerData data;
  data.batch = std::move(batch);
  data.meta_info = std::move(meta_info);
  return group_.call(method, data, std::move(rows));
}

RolloutBatch PpoWorkers::ask_balanced(const std::string& method, RolloutBatch batch) {
  auto rows = rows_of_ranks(method, batch, rows_in_order(batch.size()), batch.size());
  return ask(method, std::move(batch), std::move(rows)).batch;
}

// A mini-batch has the same rows on any number of data parallel ranks.
UpdateOutput PpoWorkers::ask_update(const std::string& method,
                                    RolloutBatch batch,
                                    const MiniBatches& mini_batches) {
  const auto seed = mix64(static_cast<std::uint64_t>(config_.actor.data_loader_seed));
  const auto order = mini_batches.shuffle
                         ? shuffled_epochs(batch.size(), mini_batches.epochs,
                                           derive(seed, static_cast<std::uint64_t>(called_step_)))
                         : rows_in_order(batch.size());
  auto rows = rows_of_ranks(method, batch, order, mini_batches.size);
  return ask(method, std::move(batch), std::move(rows)).meta_info.get<UpdateOutput>();
}

WorkerGroup::Call PpoWorkers::start_generating(const RolloutBatch& prompts, Sampling sampling) {
  const bool partial = sampling.num_groups > 0;
  if (partial) {
    const auto parts = group_.num_parts("generate_sequences");
    require(sampling.num_groups % parts == 0 && prompts.size() % (parts * config_.rollout.n) == 0,
            ErrorKind::kUsage,
            "async_training.partial_rollout: data.train_batch_size and data.gen_batch_size are no "
            "multiples of the rollout's {} data parallel ranks",
            parts);
    sampling.num_groups /= parts;
  }
  return group_.start("generate_sequences",
                      {.batch = asked_prompts(prompts),
                       .meta_info = {{"global_step", called_step_}, {"sampling", sampling}}},
                      {}, /*own_rows=*/partial);
}

// The columns of prompts that sessions begin with.
RolloutBatch PpoWorkers::asked_prompts(const RolloutBatch& prompts) const {
  auto asked = prompts.only({&RolloutBatch::seeds});
  if (config_.rollout.agents.enabled()) {
    asked.raw_prompt = prompts.raw_prompt;
    asked.agent_name = prompts.agent_name;
    asked.replay = prompts.replay;
  }
  if (config_.rollout.agents.enabled() || config_.reward.scores_early()) {
    asked.data_source = prompts.data_source;
    asked.ground_truth = prompts.ground_truth;
    asked.extra_info = prompts.extra_info;
  }
  return asked;
}

RolloutBatch PpoWorkers::finish_generating(WorkerGroup::Call call) {
  auto answered = group_.finish(std::move(call)).batch;
  const auto restarts = std::exchange(answered.reward_restarts, {});
  if (restarts.defined()) reward_restarts_ += restarts.sum().item<std::int64_t>();
  return answered;
}

RolloutBatch PpoWorkers::keep_rows(const RolloutBatch& batch) {
  auto asked = batch.without_columns();
  asked.kept = batch.kept;
  each_column([&](const char* name, Per per, auto member) {
    if (!goes_with_rows(per, name)) asked.*member = batch.*member;
  });
  return ask_balanced("keep_rows", std::move(asked));
}

RolloutBatch PpoWorkers::gather_rows(const RolloutBatch& batch) {
  if (batch.kept.empty()) return batch;
  (void)ask("gather_rows", batch);
  return std::exchange(gathered_, {});
}

RolloutBatch PpoWorkers::carried_sessions() {
  return group_
      .finish(group_.start("carried_sessions", {.meta_info = {{"global_step", called_step_}}}, {},
                           /*own_rows=*/true))
      .batch;
}

void PpoWorkers::carry_sessions(const RolloutBatch& prompts, const RolloutBatch& sessions) {
  auto asked = asked_prompts(prompts);
  asked.session = sessions.session;
  (void)ask("carry_sessions", std::move(asked));
}

RolloutBatch PpoWorkers::compute_reward(const RolloutBatch& batch) {
  auto asked = batch.only({});
  asked.images.clear();
  asked.agent_name = batch.agent_name;
  asked.agent_info = batch.agent_info;
  asked.data_source = batch.data_source;
  asked.ground_truth = batch.ground_truth;
  asked.extra_info = batch.extra_info;
  return ask("compute_reward", std::move(asked)).batch;
}

RolloutBatch PpoWorkers::compute_rm_score(const RolloutBatch& batch) {
  return ask("compute_rm_score", batch.only({})).batch;
}

RolloutBatch PpoWorkers::compute_log_prob(const RolloutBatch& batch) {
  auto asked = batch.only({&RolloutBatch::routed_experts});
  batch.give(asked, &RolloutBatch::sampling_mask);
  return ask_balanced("compute_log_prob", std::move(asked));
}

RolloutBatch PpoWorkers::compute_ref_log_prob(const RolloutBatch& batch) {
  auto asked = batch.only({});
  batch.give(asked, &RolloutBatch::sampling_mask);
  return ask_balanced("compute_ref_log_prob", std::move(asked));
}

RolloutBatch PpoWorkers::compute_values(const RolloutBatch& batch) {
  return ask_balanced("compute_values", batch.only({}));
}

UpdateOutput PpoWorkers::update_critic(const RolloutBatch& batch) {
  return ask_update(
      "update_critic",
      batch.only({&RolloutBatch::response_mask, &RolloutBatch::values, &RolloutBatch::returns}),
      config_.critic_mini_batches());
}

UpdateOutput PpoWorkers::update_actor(const RolloutBatch& batch) {
  auto asked = batch.only({&RolloutBatch::response_mask, &RolloutBatch::old_log_probs,
                           &RolloutBatch::advantages, &RolloutBatch::rollout_is_weights,
                           &RolloutBatch::routed_experts});
  batch.give(asked, &RolloutBatch::sampling_mask);
  if (config_.actor.use_kl_loss) batch.give(asked, &RolloutBatch::ref_log_prob);
  if (needs_cov_tokens(config_.actor.policy_loss.loss_mode))
    asked.index = at::arange(batch.size(), at::kLong);
  return ask_update("update_actor", std::move(asked), config_.actor_mini_batches());
}

void PpoWorkers::update_weights(std::int64_t weights_step) {
  (void)group_.call("update_weights", {.meta_info = {{"weights_step", weights_step}}});
}

void PpoWorkers::sleep_rollout() {
  (void)group_.call("sleep_rollout");
}

// The actor comes last: it has no newer checkpoint than the critic.
std::vector<std::string> PpoWorkers::saved_roles() const {
  if (config_.use_critic()) return {"critic", "actor"};
  return {"actor"};
}

void PpoWorkers::save_checkpoints(std::int64_t step,
                                  const std::map<std::string, std::string>& caller) {
  for (const auto& role : saved_roles())
    (void)group_.call(
        role + "/save_checkpoint",
        {.meta_info = {
             {"global_step", step}, {"async", config_.checkpoint.async_save}, {"caller", caller}}});
}

bool PpoWorkers::finish_saves(bool wait) {
  bool saved = false;
  for (const auto& role : saved_roles())
    saved = group_.call(role + "/finish_save", {.meta_info = {{"wait", wait}}}).meta_info;
  return saved;
}

std::map<std::string, std::string> PpoWorkers::load_checkpoints(std::int64_t step,
                                                                const std::filesystem::path& run) {
  std::map<std::string, std::string> caller;
  for (const auto& role : saved_roles())
    caller = group_
                 .call(role + "/load_checkpoint",
                       {.meta_info = {{"root", run.empty() ? "" : (run / role).string()},
                                      {"global_step", step}}})
                 .meta_info;
  return caller;
}

Metrics PpoWorkers::message_metrics() {
  Metrics metrics;
  for (const auto& [method, cost] : group_.take_costs()) {
    if (world_.size() == 1) continue;
    if (method == "generate_sequences" && config_.is_async())
      metrics["perf/rollouter/busy_s"] = cost.work;
    metrics["perf/messages_s/" + method] = cost.seconds;
    metrics["perf/messages_mb/" + method] = static_cast<double>(cost.bytes) / 1e6;
  }
  return metrics;
}

}  // namespace ferry::trainer
