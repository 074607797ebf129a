#include "trainer/workers/actor_rollout_ref_worker.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/messages.h"
#include "models/pipeline_forward.h"
#include "trainer/agents/session_journal.h"
#include "trainer/config/ppo_rules.h"
#include "trainer/data/permutation.h"
#include "trainer/engine/run_options.h"
#include "trainer/plan/run_setup.h"
#include "trainer/replicas/session_packet.h"
#include "trainer/workers/carried_groups.h"
#include "trainer/workers/role.h"

namespace ferry::trainer {
namespace {

ActorLossConfig loss_config(const PpoConfig& all, const LossAggregation& aggregation) {
  const auto& config = all.actor;
  return {.policy_loss = {.loss_mode = config.policy_loss.loss_mode,
                          .loss_agg_mode = aggregation.loss_agg_mode,
                          .clip_ratio_low = config.clip_ratio_low.value_or(config.clip_ratio),
                          .clip_ratio_high = config.clip_ratio_high.value_or(config.clip_ratio),
                          .clip_ratio_c = config.clip_ratio_c,
                          .tau_pos = config.tau_pos,
                          .tau_neg = config.tau_neg,
                          .clip_cov_ratio = config.policy_loss.clip_cov_ratio,
                          .clip_cov_lb = config.policy_loss.clip_cov_lb,
                          .clip_cov_ub = config.policy_loss.clip_cov_ub,
                          .kl_cov_ratio = config.policy_loss.kl_cov_ratio,
                          .ppo_kl_coef = config.policy_loss.ppo_kl_coef},
          .rollout_correction = all.algorithm.rollout_correction,
          .entropy_coeff = config.entropy_coeff,
          .use_kl_loss = config.use_kl_loss,
          .kl_loss_coef = config.kl_loss_coef,
          .kl_loss_type = config.kl_loss_type};
}

std::vector<Session> sessions_of(const RolloutBatch& prompts, const AgentSections& agents) {
  std::vector<Session> sessions(static_cast<std::size_t>(prompts.size()));
  for (std::int64_t row = 0; row < prompts.size(); ++row) {
    const auto index = static_cast<std::size_t>(row);
    auto& session = sessions[index];
    const auto tokens = prompts.prompt(row);
    session.prompt.assign(tokens.begin(), tokens.end());
    session.seed = static_cast<std::uint64_t>(prompts.seeds[row].item<std::int64_t>());
    if (!prompts.images.empty()) session.images = prompts.images[index];
    if (prompts.data_source.empty()) continue;
    session.task = {{"data_source", prompts.data_source[index]},
                    {"ground_truth", prompts.ground_truth[index]},
                    {"extra_info", prompts.extra_info[index]}};
    if (prompts.raw_prompt.empty()) continue;
    session.messages = Messages::parse(prompts.raw_prompt[index]);
    session.loop = agents.loop_of(prompts.agent_name[index]);
    if (!prompts.replay.empty()) session.replay = prompts.replay[index];
  }
  return sessions;
}

// Adds turn_scores and agent_info, with the messages where a program will be asked about them.
void add_sessions(RolloutBatch& batch,
                  const std::vector<Session>& sessions,
                  const PromptEncoder& encoder,
                  const RewardConfig& reward,
                  bool partial) {
  batch.turn_scores = at::zeros({batch.response_offsets.back()}, at::kFloat);
  for (std::size_t row = 0; row < sessions.size(); ++row) {
    const auto& session = sessions[row];
    const auto scores = batch.response_of(batch.turn_scores, static_cast<std::int64_t>(row));
    for (const auto& [place, score] : session.turn_scores)
      scores[static_cast<std::int64_t>(place)].add_(score);
    batch.agent_info.push_back({{"num_turns", session.num_turns()},
                                {"exchanges", session.exchanges},
                                {"extra_info", session.extra_info}});
    if (partial) batch.agent_info.back()["global_steps"] = runs_of_steps(session.global_steps);
    if (!reward.command.empty() && !reward.scores_early())
      batch.agent_info.back()["messages"] = conversation_of(session, encoder);
  }
}

}  // namespace

ActorRolloutRefWorker::ActorRolloutRefWorker(models::World& world,
                                             const PpoConfig& config,
                                             std::shared_ptr<const converter::Checkpoint> origin,
                                             std::int64_t total_steps)
    : world_(world), config_(config), origin_(std::move(origin)) {
  require(config.actor.router_replay.mode == RouterReplayMode::kDisabled ||
              origin_->map.config.num_moe_experts > 0,
          ErrorKind::kUsage, "actor_rollout_ref.actor.router_replay.mode: {} has no experts",
          config.model.path);
  const auto rank = world.rank();
  if (has_role(config.actor.ranks, rank)) {
    actor_ = std::make_unique<MegatronWorker>(world,
                                              role_engine({.role = Role::kActor,
                                                           .origin = origin_,
                                                           .model = config.model,
                                                           .engine = config.actor.megatron,
                                                           .ranks = config.actor.ranks},
                                                          config, config.actor.optim, total_steps),
                                              OffloadFlags{});  // the hybrid engine moves it
  }
  if (config.use_reference_policy() && has_role(config.ref.ranks, rank)) {
    ref_ = std::make_unique<MegatronWorker>(
        world,
        MegatronEngineOptions{.role = Role::kRef,
                              .origin = origin_,
                              .model = config.model,
                              .engine = config.ref.megatron,
                              .ranks = config.ref.ranks,
                              .memory = memory_settings(config, Role::kRef)},
        offload_flags(config.ref.megatron));
  }
  if (has_role(config.rollout.ranks, rank))
    rollout_mesh_ = std::make_unique<models::ParallelState>(world, config.rollout_parallel(),
                                                            "rollout", config.rollout.ranks);
}

ActorRolloutRefWorker::~ActorRolloutRefWorker() = default;

void ActorRolloutRefWorker::init_rollout(const PromptEncoder& encoder,
                                         const Tools& tools,
                                         RewardManager* rewards) {
  for (auto* const role : {actor_.get(), ref_.get()})
    if (role != nullptr) role->see(encoder);
  const auto& rollout = config_.rollout;
  const bool shares_memory = config_.rollout_shares_memory();
  auto resting = offload_flags(config_.actor.megatron);
  resting.param = resting.param && !shares_memory;
  RolloutWorker worker;
  if (rollout_mesh_) {
    if (actor_) actor_->engine().offload().to_host({.grad = resting.grad});
    rollout_ = make_rollout(world_, *rollout_mesh_, config_, *origin_, encoder, tools,
                            shares_memory ? actor_->engine().chunks().front() : nullptr);
    worker = {.model = rollout_.model, .engine = rollout_.engine.get()};
    encoder_ = &encoder;
    if (rewards != nullptr && rollout_mesh_->tp().rank() == 0) {
      const auto& dp = rollout_mesh_->dp();
      const auto workers = config_.reward.num_workers;
      rewards->use_workers(
          std::max(1, workers / dp.size() + (dp.rank() < workers % dp.size() ? 1 : 0)));
      rewards_ = rewards;
    }
  }
  if (rollout.replicas.enabled())
    replicas_ = std::make_unique<ReplicaGroup>(world_, config_, *origin_, rollout_mesh_.get(),
                                               rollout_.model);
  hybrid_ = std::make_unique<HybridEngine>(
      world_, "weights", actor_ ? actor_->engine().chunks() : std::vector<models::GPTModel*>(),
      actor_ ? &actor_->engine().offload() : nullptr, worker,
      HybridEngineOptions{
          .offload = resting,
          .sleep_level = !rollout.free_cache_engine                                             ? 0
                         : shares_memory || rollout.update_weights_delta != models::Delta::kOff ? 1
                                                                                                : 2,
          .verify = rollout.verify_weights,
          .reshard = {.bucket_bytes = rollout.update_weights_bucket_megabytes << 20,
                      .delta = rollout.update_weights_delta}});
}

Dispatch ActorRolloutRefWorker::actor_dispatch() const {
  return actor_ ? actor_->dispatch() : Dispatch::none();
}

Dispatch ActorRolloutRefWorker::ref_dispatch() const {
  return ref_ ? ref_->dispatch() : Dispatch::none();
}

Dispatch ActorRolloutRefWorker::rollout_dispatch() const {
  return rollout_mesh_ ? megatron_compute_proto(*rollout_mesh_) : Dispatch::none();
}

RolloutBatch ActorRolloutRefWorker::generate_sequences(const RolloutBatch& prompts,
                                                       const Sampling& sampling) {
  const rollout::SamplingParams params{.temperature = sampling.temperature,
                                       .top_k = sampling.top_k,
                                       .top_p = sampling.top_p,
                                       .ignore_eos = config_.rollout.ignore_eos,
                                       .return_entropy = sampling.entropy,
                                       .return_sampling_mask = sampling.sampling_mask};
  auto sessions = sessions_of(prompts, config_.rollout.agents);
  const bool partial = sampling.num_groups > 0;
  if (partial) {
    std::ranges::move(sessions, std::back_inserter(carried_));
    sessions = finished_groups(sampling, params);
  } else {
    auto observer = observer_of(sessions);
    if (replicas_) observer = replicas_->share(sessions, params, std::move(observer));
    rollout_.agents->run(sessions, params, weights_step_, observer);
  }
  take_spans_of(*rollout_.agents);
  auto batch = answered(sessions, sampling);
  if (partial) {
    std::vector<std::int64_t> seeds;
    for (const auto& session : sessions) seeds.push_back(static_cast<std::int64_t>(session.seed));
    batch.seeds = at::tensor(seeds, at::kLong);
  }
  if (rewards_ != nullptr) {
    rewards_->finish(batch, sessions);
    take_spans_of(*rewards_);
  }
  return batch;
}

RolloutBatch ActorRolloutRefWorker::carried_sessions() const {
  auto rows = RolloutBatch::of(std::vector<RolloutBatch::Tokens>(carried_.size()));
  for (const auto& session : carried_) rows.session.push_back(to_packet(session));
  return rows;
}

void ActorRolloutRefWorker::carry_sessions(const RolloutBatch& sessions) {
  carried_ = sessions_of(sessions, config_.rollout.agents);
  for (std::size_t i = 0; i < carried_.size(); ++i) {
    auto session = session_of(sessions.session[i]);
    const bool has_program =
        session.loop == AgentLoopKind::kEnv || session.loop == AgentLoopKind::kProgram;
    if (has_program && session.has_begun && !session.is_over && session.replay.is_null()) continue;
    carried_[i] = std::move(session);
    if (rewards_ != nullptr && carried_[i].is_over) rewards_->session_is_over(carried_[i]);
  }
}

SessionObserver ActorRolloutRefWorker::observer_of(const std::vector<Session>& sessions) const {
  SessionObserver observer;
  if (rewards_ != nullptr) {
    observer.is_over = [&](std::size_t row) { rewards_->session_is_over(sessions[row]); };
    observer.poll = [&] { rewards_->poll(); };
  }
  return observer;
}

// Groups are the rows of a prompt, which follow each other; the oldest come first. Played again, a
// session itself waits for the next weights where it did, and the journal chooses. Sessions of one
// turn end by a clock of tokens; when others end depends on programs, and the journal has it.
std::vector<Session> ActorRolloutRefWorker::finished_groups(const Sampling& sampling,
                                                            const rollout::SamplingParams& params) {
  const auto n = static_cast<std::size_t>(config_.rollout.n);
  const auto wanted = static_cast<std::size_t>(sampling.num_groups);
  const bool again = !carried_.empty() && !carried_.front().replay.is_null();
  std::set<std::size_t> old;
  for (std::size_t i = 0; i < carried_.size(); ++i) {
    const auto& [steps, replay] = std::tie(carried_[i].global_steps, carried_[i].replay);
    if (again ? replay.at("step") == sampling.learned_at
              : !steps.empty() && steps.front() <= sampling.must_finish)
      old.insert(i / n);
  }
  CarriedGroups groups(carried_, n, wanted, std::move(old));
  const auto observer = observer_of(carried_);
  const auto run = [&](const SessionObserver& told, const auto& is_enough) {
    rollout_.agents->run(carried_, params, weights_step_, told, is_enough);
  };
  if (again || config_.rollout.agents.enabled()) {
    const auto is_enough = [&] { return !again && groups.are_finished(); };
    if (replicas_ && !again) {
      run(replicas_->share(carried_, params, observer), is_enough);
      replicas_->recall();
    } else {
      run(observer, is_enough);
    }
  } else {
    groups.keep_time(config_.rollout.max_num_seqs, observer.is_over);
    SessionObserver quiet;  // the clock tells
    quiet.poll = observer.poll;
    if (replicas_) {
      run(replicas_->share(carried_, params, quiet), [&] { return groups.are_finished(); });
      replicas_->recall();
    }
    run(quiet, [&] { return groups.know_their_end(); });
    groups.cut();
  }
  require(groups.are_finished(), ErrorKind::kUsage,
          "step {}: {} groups are finished, instead of {}: the run is another one than that which "
          "is played again",
          sampling.learned_at, groups.num_over(), wanted);
  return groups.take();
}

RolloutBatch ActorRolloutRefWorker::answered(const std::vector<Session>& sessions,
                                             const Sampling& sampling) const {
  std::vector<RolloutBatch::Tokens> asked, responses;
  std::vector<float> log_probs, entropys;
  std::vector<std::uint8_t> response_mask;
  std::vector<std::int64_t> kept, global_steps, oldest, newest;
  models::SamplingMask mask{.offsets = {0}};
  for (const auto& session : sessions) {
    asked.push_back(session.prompt);
    auto& response = responses.emplace_back();
    for (const auto& token : session.response) {
      response.push_back(token.token_id);
      log_probs.push_back(token.processed_logprob);
      entropys.push_back(token.entropy);
      kept.insert(kept.end(), token.sampling_mask.begin(), token.sampling_mask.end());
      mask.offsets.push_back(static_cast<std::int64_t>(kept.size()));
    }
    std::ranges::copy(session.response_mask, std::back_inserter(response_mask));
    const auto& steps = session.global_steps;
    std::ranges::copy(steps, std::back_inserter(global_steps));
    oldest.push_back(steps.empty() ? weights_step_ : steps.front());
    newest.push_back(steps.empty() ? weights_step_ : steps.back());
  }
  auto batch = RolloutBatch::of(asked, responses);
  batch.max_prompt_length = config_.data.max_prompt_length;
  batch.max_response_length = config_.data.max_response_length;
  batch.response_mask = at::tensor(response_mask, at::kByte).to(at::kBool);
  batch.rollout_log_probs = at::tensor(log_probs);
  batch.min_global_steps = at::tensor(oldest, at::kLong);
  batch.max_global_steps = at::tensor(newest, at::kLong);
  if (config_.is_async()) batch.global_steps = at::tensor(global_steps, at::kLong);
  if (sampling.entropy) batch.entropys = at::tensor(entropys);
  if (sampling.sampling_mask) {
    mask.token_ids = at::tensor(kept, at::kLong);
    batch.sampling_mask = std::move(mask);
  }
  if (sampling.routed_experts) {
    std::vector<at::Tensor> of_rows;
    for (const auto& session : sessions) {
      of_rows.push_back(
          rollout::routed_experts_tensor(session.routed_experts, origin_->map.config));
      // The last token was drawn, but not computed: replayed() lets routers choose.
      of_rows.push_back(at::zeros_like(of_rows.back().narrow(0, 0, 1)));
    }
    batch.routed_experts = at::cat(of_rows);
  }
  if (config_.rollout.agents.enabled())
    add_sessions(batch, sessions, *encoder_, config_.reward, sampling.num_groups > 0);
  return batch;
}

// In mode R3 routers choose for the last token of each row: the rollout did not record it.
RolloutBatch ActorRolloutRefWorker::replayed(const RolloutBatch& batch) const {
  auto replayed = batch;
  if (!batch.routed_experts.defined() || config_.actor.router_replay.mode != RouterReplayMode::kR3)
    return replayed;
  replayed.routed_experts =
      batch.routed_experts.to(at::kShort, /*non_blocking=*/false, /*copy=*/true);
  for (std::size_t row = 1; row < batch.offsets.size(); ++row)
    replayed.routed_experts[batch.offsets[row] - 1].fill_(-1);
  return replayed;
}

LogProbs ActorRolloutRefWorker::log_probs(MegatronWorker& worker,
                                          const RolloutBatch& batch,
                                          const MicroBatchSize& size,
                                          bool record_routes) const {
  return trainer::compute_log_prob(
      worker.engine().pipeline(/*forward_only=*/true), batch,
      worker.padded_micro_batches(batch, size, config_.longest_sequence()),
      config_.rollout.temperature, record_routes, worker.visual_inputs(batch));
}

RolloutBatch ActorRolloutRefWorker::compute_log_prob(const RolloutBatch& batch) {
  const auto result =
      log_probs(*actor_, replayed(batch), config_.log_prob_micro_batches(config_.rollout.log_prob),
                config_.actor.router_replay.mode == RouterReplayMode::kR2);
  auto answer = batch.without_columns();
  answer.old_log_probs = result.log_probs;
  answer.entropys = result.entropys;
  answer.routed_experts = result.routed_experts;
  return answer;
}

RolloutBatch ActorRolloutRefWorker::compute_ref_log_prob(const RolloutBatch& batch) {
  const MegatronWorker::Awake awake(*ref_, {.param = true});
  auto answer = batch.without_columns();
  answer.ref_log_prob =
      log_probs(*ref_, batch, config_.log_prob_micro_batches(config_.ref.log_prob)).log_probs;
  return answer;
}

// Chooses from the mini-batch as a whole, by a forward pass of it: every data parallel rank sees
// all of it, in the order of its rows, so that the draw does not depend on who has which.
at::Tensor ActorRolloutRefWorker::cov_tokens(const RolloutBatch& batch,
                                             const PolicyLossConfig& loss,
                                             std::int64_t step,
                                             std::int64_t number) const {
  auto mine = batch.only({&RolloutBatch::index, &RolloutBatch::response_mask,
                          &RolloutBatch::old_log_probs, &RolloutBatch::advantages});
  mine.log_prob = log_probs(*actor_, batch, config_.actor_micro_batches()).log_probs;
  const auto& dp = actor_->engine().mesh().dp();
  const auto gathered = RolloutBatch::concat(models::gather(dp, mine));
  const auto order = gathered.index.argsort();
  const auto all = gathered.select(
      {order.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(gathered.size())});
  const auto seed = mix64(static_cast<std::uint64_t>(config_.actor.data_loader_seed));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(
      derive(derive(seed, static_cast<std::uint64_t>(step)), static_cast<std::uint64_t>(number)));
  const auto chosen = select_cov_tokens({.old_log_prob = all.padded(all.old_log_probs),
                                         .log_prob = all.padded(all.log_prob),
                                         .advantages = all.padded(all.advantages),
                                         .response_mask = all.padded(all.response_mask)},
                                        loss, generator);
  return batch.ragged(
      chosen.index_select(0, order.argsort()).narrow(0, dp.rank() * batch.size(), batch.size()));
}

UpdateOutput ActorRolloutRefWorker::update_actor(const RolloutBatch& batch, std::int64_t step) {
  const auto aggregation = config_.actor_loss_aggregation();
  ActorUpdate options{.loss = loss_config(config_, aggregation),
                      .temperature = config_.rollout.temperature,
                      .loss_scale_factor = aggregation.loss_scale_factor};
  std::int64_t number = 0;
  return actor_->update(replayed(batch), config_.actor_mini_batches(),
                        [&](const RolloutBatch& mini_batch, double grad_scale) {
                          if (needs_cov_tokens(options.loss.policy_loss.loss_mode))
                            options.cov_tokens =
                                cov_tokens(mini_batch, options.loss.policy_loss, step, number++);
                          options.visual = actor_->visual_inputs(mini_batch);
                          return trainer::update_actor(
                              actor_->engine().pipeline(), mini_batch,
                              actor_->micro_batches(mini_batch, config_.actor_micro_batches(),
                                                    config_.longest_sequence()),
                              options, grad_scale);
                        });
}

void ActorRolloutRefWorker::update_weights(std::int64_t weights_step) {
  weights_step_ = weights_step;
  (void)hybrid_->rollout_mode();
  if (replicas_) replicas_->give_weights(weights_step);
}

}  // namespace ferry::trainer
