#include "trainer/workers/actor_rollout_ref_worker.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <span>
#include <utility>

#include "converter/alignment/model_files.h"
#include "distckpt/base/error.h"
#include "models/certificate/host_threads.h"
#include "models/pipeline_forward.h"
#include "trainer/data/permutation.h"
#include "trainer/engine/run_options.h"
#include "trainer/update/compute_log_prob.h"
#include "trainer/update/ppo_options.h"
#include "trainer/workers/batch_rows.h"
#include "trainer/workers/role.h"

namespace ferry::trainer {
namespace {

models::ParallelConfig rollout_parallel(const PpoConfig& config) {
  models::ParallelConfig parallel;
  parallel.tensor_model_parallel_size = config.rollout.tensor_model_parallel_size;
  parallel.expert_model_parallel_size = config.rollout.expert_parallel_size;
  parallel.make_vocab_size_divisible_by =
      config.actor.megatron.parallel.make_vocab_size_divisible_by;
  return parallel;
}

ActorLossConfig loss_config(const PpoConfig& all, const LossAggregation& aggregation) {
  const auto& config = all.actor;
  const auto& correction = all.algorithm.rollout_correction;
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
          .bypass_mode = correction.bypass_mode ? std::optional(BypassModeConfig{
                                                      .correction = rollout_correction(correction),
                                                      .loss_type = correction.loss_type})
                                                : std::nullopt,
          .entropy_coeff = config.entropy_coeff,
          .use_kl_loss = config.use_kl_loss,
          .kl_loss_coef = config.kl_loss_coef,
          .kl_loss_type = config.kl_loss_type};
}

// Of each row, for replay; none where routers choose. They do for the last token of an answer, if
// the rollout recorded: it has drawn that one, but not computed it.
std::vector<at::Tensor> routed_experts_of(const DataProto& batch,
                                          const RouterReplaySection& replay) {
  if (!batch.batch().contains("routed_experts")) return {};
  auto rows = sequence_rows(batch.tensor("routed_experts"), answered_prompts_of(batch),
                            batch.tensor("prompts").size(1));
  if (replay.mode == RouterReplayMode::kR3) {
    for (auto& row : rows) {
      row = row.to(at::kShort, /*non_blocking=*/false, /*copy=*/true);
      row[-1].fill_(-1);
    }
  }
  return rows;
}

nlohmann::json as_json(const models::ReshardReport& report) {
  return {{"bytes_in_place", report.bytes_in_place}, {"bytes_local", report.bytes_local},
          {"bytes_sent", report.bytes_sent},         {"bytes_received", report.bytes_received},
          {"staging_bytes", report.staging_bytes},   {"rounds", report.rounds}};
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
    actor_ = std::make_unique<MegatronWorker>(
        world,
        role_engine({.name = "actor",
                     .origin = origin_,
                     .model = config.model,
                     .engine = config.actor.megatron,
                     .ranks = config.actor.ranks},
                    config, config.actor.optim, total_steps),
        // The hybrid engine moves the rest.
        OffloadFlags{.optimizer = config.actor.megatron.optimizer_offload});
  }
  if (config.use_reference_policy() && has_role(config.ref.ranks, rank)) {
    ref_ = std::make_unique<MegatronWorker>(world,
                                            MegatronEngineOptions{.name = "ref",
                                                                  .origin = origin_,
                                                                  .model = config.model,
                                                                  .engine = config.ref.megatron,
                                                                  .ranks = config.ref.ranks},
                                            offload_flags(config.ref.megatron));
  }
  if (has_role(config.rollout.ranks, rank))
    rollout_mesh_ = std::make_unique<models::ParallelState>(world, rollout_parallel(config),
                                                            "rollout", config.rollout.ranks);
}

ActorRolloutRefWorker::~ActorRolloutRefWorker() = default;

// A pure function of the configuration: ranks agree.
bool ActorRolloutRefWorker::shares_memory() const {
  const auto& engine = config_.actor.megatron;
  const auto& p = engine.parallel;
  return config_.actor.ranks == config_.rollout.ranks &&
         p.tensor_model_parallel_size == config_.rollout.tensor_model_parallel_size &&
         p.expert_model_parallel_size == config_.rollout.expert_parallel_size &&
         p.expert_tensor_parallel() == config_.rollout.tensor_model_parallel_size &&
         p.pipeline_model_parallel_size == 1 && p.context_parallel_size == 1 &&
         !engine.uses_sequence_parallel();
}

void ActorRolloutRefWorker::init_rollout(std::vector<std::int64_t> eos_token_ids) {
  const auto& rollout = config_.rollout;
  const auto resting = config_.actor.megatron;
  RolloutWorker worker;
  if (rollout_mesh_) {
    if (!shares_memory()) {
      auto options = model_options(resting);
      options.sequence_parallel = false;
      options.recompute = {};
      models::choose_host_threads(world_, origin_->map.config);
      rollout_model_ = models::make_stage(origin_->map.config, *rollout_mesh_, options);
      // The engine measures what a step of it needs, with weights that are some.
      (void)converter::load_model(rollout_model_, *origin_, {.round = true});
    }
    worker.model =
        shares_memory() ? actor_->engine().chunks().front() : rollout_model_.front().get();
    if (actor_) actor_->engine().offload().to_host({.grad = resting.grad_offload});
    engine_ = std::make_unique<rollout::LLMEngine>(
        *worker.model,
        rollout::EngineOptions{
            .max_num_seqs = rollout.max_num_seqs,
            .max_num_batched_tokens = rollout.max_num_batched_tokens,
            .max_model_len = config_.data.max_prompt_length + config_.data.max_response_length,
            .gpu_memory_utilization = rollout.gpu_memory_utilization,
            .kv_cache_bytes = rollout.kv_cache_bytes,
            .enable_prefix_caching = rollout.enable_prefix_caching,
            .enable_chunked_prefill = rollout.enable_chunked_prefill,
            .enforce_eager = rollout.enforce_eager,
            .enable_return_routed_experts =
                config_.actor.router_replay.mode == RouterReplayMode::kR3,
            .eos_token_ids = std::move(eos_token_ids)});
    worker.engine = engine_.get();
  }
  hybrid_ = std::make_unique<HybridEngine>(
      world_, "weights", actor_ ? actor_->engine().chunks() : std::vector<models::GPTModel*>(),
      actor_ ? &actor_->engine().offload() : nullptr, worker,
      HybridEngineOptions{
          .offload = {.param = resting.param_offload && !shares_memory(),
                      .grad = resting.grad_offload},
          .sleep_level = !rollout.free_cache_engine ? 0
                         : shares_memory() || rollout.update_weights_delta != models::Delta::kOff
                             ? 1
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

rollout::SamplingParams ActorRolloutRefWorker::sampling_params(
    const nlohmann::json& meta_info) const {
  return {.temperature = meta_info.at("temperature").get<double>(),
          .top_k = meta_info.at("top_k").get<std::int64_t>(),
          .top_p = meta_info.at("top_p").get<double>(),
          .ignore_eos = config_.rollout.ignore_eos,
          .max_tokens = config_.data.max_response_length,
          .return_entropy = meta_info.value("entropy", false),
          .return_sampling_mask = meta_info.value("sampling_mask", false)};
}

DataProto ActorRolloutRefWorker::generate_sequences(const DataProto& prompts) {
  const auto rows = prompts.size();
  const auto width = static_cast<std::int64_t>(config_.data.max_response_length);
  const auto tokens = prompt_tokens_of(prompts);
  const auto params = sampling_params(prompts.meta_info);
  std::vector<std::vector<std::int64_t>> ids(static_cast<std::size_t>(rows));
  std::vector<std::vector<float>> log_probs(static_cast<std::size_t>(rows));
  std::vector<std::vector<float>> entropies(static_cast<std::size_t>(rows));
  std::vector<std::vector<std::vector<std::int32_t>>> kept(static_cast<std::size_t>(rows));
  std::vector<std::vector<std::byte>> routes(static_cast<std::size_t>(rows));
  std::map<std::string, std::size_t> row_of;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto index = static_cast<std::size_t>(row);
    auto mine = params;
    mine.seed = static_cast<std::uint64_t>(prompts.tensor("seeds")[row].item<std::int64_t>());
    const auto id = std::to_string(row);
    row_of[id] = index;
    engine_->add_request(id, tokens[index], mine);
  }
  while (engine_->has_unfinished()) {
    for (const auto& output : engine_->step()) {
      if (output.error) throw Error(*output.error);
      const auto index = row_of.at(output.request_id);
      for (const auto& sample : output.outputs) {
        for (const auto& token : sample.tokens) {
          ids[index].push_back(token.token_id);
          log_probs[index].push_back(token.processed_logprob);
          entropies[index].push_back(token.entropy);
          kept[index].push_back(token.sampling_mask);
        }
        std::ranges::copy(sample.routed_experts, std::back_inserter(routes[index]));
      }
    }
  }
  std::vector<at::Tensor> responses, masks;
  for (const auto& row : ids) {
    responses.push_back(at::tensor(row, at::kLong));
    masks.push_back(at::ones_like(responses.back()));
  }
  const auto numbers = [&](const std::vector<std::vector<float>>& of_rows) {
    std::vector<at::Tensor> tensors;
    for (const auto& row : of_rows) tensors.push_back(at::tensor(row));
    return response_column(tensors, width);
  };
  DataProto answers({{"responses", response_column(responses, width)},
                     {"response_mask", response_column(masks, width)},
                     {"weights_step", at::full({rows}, weights_step_, at::kLong)},
                     {"rollout_log_probs", numbers(log_probs)}});
  if (params.return_entropy) answers.set("entropys", numbers(entropies));
  if (params.return_sampling_mask) {
    std::vector<nlohmann::json> cells;
    for (const auto& row : kept) cells.push_back(sampling_mask_cell(row));
    answers.set("sampling_mask", std::move(cells));
  }
  if (prompts.meta_info.value("routed_experts", false)) {
    std::vector<at::Tensor> routed;
    std::vector<AnsweredPrompt> begin;
    for (std::size_t row = 0; row < ids.size(); ++row) {
      routed.push_back(rollout::routed_experts_tensor(routes[row], origin_->map.config));
      begin.push_back({.num_prompt_tokens = static_cast<std::int64_t>(tokens[row].size())});
    }
    const auto prompt_width = prompts.tensor("prompts").size(1);
    answers.set("routed_experts",
                sequence_column(routed, begin, prompt_width, prompt_width + width));
  }
  return answers;
}

DataProto ActorRolloutRefWorker::log_probs(MegatronWorker& worker,
                                           const DataProto& batch,
                                           const MicroBatchSize& size,
                                           bool with_entropy,
                                           const char* name,
                                           std::vector<at::Tensor>* routed_experts) const {
  const auto answers = answered_prompts_of(batch);
  const auto results =
      trainer::compute_log_prob(worker.engine().pipeline(/*forward_only=*/true), answers,
                                worker.micro_batches(answers, size, config_.longest_sequence()),
                                batch.meta_info.at("temperature").get<double>(), routed_experts);
  const auto width = batch.tensor("responses").size(1);
  const auto column = [&](at::Tensor AnswerLogProbs::*one) {
    std::vector<at::Tensor> rows;
    for (const auto& result : results) rows.push_back(result.*one);
    return response_column(rows, width);
  };
  DataProto::Tensors columns{{name, column(&AnswerLogProbs::log_probs)}};
  if (with_entropy) columns["entropys"] = column(&AnswerLogProbs::entropys);
  return DataProto(columns);
}

DataProto ActorRolloutRefWorker::compute_log_prob(const DataProto& batch) {
  const auto& replay = config_.actor.router_replay;
  const bool records = replay.mode == RouterReplayMode::kR2;
  auto routes = routed_experts_of(batch, replay);
  auto answer = log_probs(*actor_, batch, config_.log_prob_micro_batches(config_.rollout.log_prob),
                          /*with_entropy=*/true, "old_log_probs",
                          records || !routes.empty() ? &routes : nullptr);
  if (records)
    answer.set("routed_experts",
               sequence_column(routes, answered_prompts_of(batch), batch.tensor("prompts").size(1),
                               batch.tensor("attention_mask").size(1)));
  return answer;
}

DataProto ActorRolloutRefWorker::compute_ref_log_prob(const DataProto& batch) {
  const MegatronWorker::Awake awake(*ref_, {.param = true});
  return log_probs(*ref_, batch, config_.log_prob_micro_batches(config_.ref.log_prob),
                   /*with_entropy=*/false, "ref_log_prob");
}

// Of the mini-batch as a whole, by a forward pass of it: every data parallel rank sees all of it,
// in the order of its rows, so that the draw does not depend on who has which.
at::Tensor ActorRolloutRefWorker::cov_tokens(const DataProto& batch,
                                             const ActorUpdate& update,
                                             std::int64_t number) const {
  auto mine = batch;
  auto routes = routed_experts_of(batch, config_.actor.router_replay);
  mine.set("log_prob", log_probs(*actor_, batch, config_.actor_micro_batches(), false,
                                 "old_log_probs", routes.empty() ? nullptr : &routes)
                           .tensor("old_log_probs"));
  const std::vector<std::string> keys{"row", "log_prob", "old_log_probs", "advantages",
                                      "response_mask"};
  const auto bytes = mine.select(keys).to_bytes();
  const auto& dp = actor_->engine().mesh().dp();
  std::vector<DataProto> parts;
  for (const auto& part :
       dp.all_gather_bytes({reinterpret_cast<const char*>(bytes.data()), bytes.size()}))
    parts.push_back(DataProto::from_bytes(std::as_bytes(std::span(part))));
  const auto gathered = DataProto::concat(parts);
  const auto order = gathered.tensor("row").argsort();
  const auto all = gathered.reorder(
      {order.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(gathered.size())});
  const auto step = batch.meta_info.at("global_step").get<std::uint64_t>();
  const auto seed = mix64(static_cast<std::uint64_t>(config_.actor.data_loader_seed));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(
      derive(derive(seed, step), static_cast<std::uint64_t>(number)));
  const auto chosen = select_cov_tokens({.old_log_prob = all.tensor("old_log_probs"),
                                         .log_prob = all.tensor("log_prob"),
                                         .advantages = all.tensor("advantages"),
                                         .response_mask = all.tensor("response_mask")},
                                        update.loss.policy_loss, generator);
  return chosen.index_select(0, order.argsort()).narrow(0, dp.rank() * batch.size(), batch.size());
}

std::map<std::string, double> ActorRolloutRefWorker::learn(const DataProto& batch,
                                                           double grad_scale,
                                                           std::int64_t number) {
  const auto aggregation = config_.actor_loss_aggregation();
  const ActorUpdate update{.loss = loss_config(config_, aggregation),
                           .temperature = batch.meta_info.at("temperature").get<double>(),
                           .loss_scale_factor = aggregation.loss_scale_factor};
  const auto answers = answered_prompts_of(batch);
  std::vector<ActorSample> samples;
  for (const auto& answer : answers)
    samples.push_back({.tokens = answer.tokens, .num_prompt_tokens = answer.num_prompt_tokens});
  const auto give = [&](at::Tensor ActorSample::*one, const at::Tensor& column) {
    const auto rows = response_rows(column, answers);
    for (std::size_t i = 0; i < samples.size(); ++i) samples[i].*one = rows[i];
  };
  give(&ActorSample::response_mask, batch.tensor("response_mask"));
  give(&ActorSample::old_log_prob, batch.tensor("old_log_probs"));
  give(&ActorSample::advantages, batch.tensor("advantages"));
  if (batch.batch().contains("ref_log_prob"))
    give(&ActorSample::ref_log_prob, batch.tensor("ref_log_prob"));
  if (batch.batch().contains("rollout_is_weights"))
    give(&ActorSample::rollout_is_weights, batch.tensor("rollout_is_weights"));
  for (std::size_t i = 0; i < answers.size(); ++i)
    samples[i].sampling_mask = answers[i].sampling_mask;
  const auto routes = routed_experts_of(batch, config_.actor.router_replay);
  for (std::size_t i = 0; i < routes.size(); ++i) samples[i].routed_experts = routes[i];
  if (needs_cov_tokens(update.loss.policy_loss.loss_mode))
    give(&ActorSample::cov_tokens, cov_tokens(batch, update, number));
  return trainer::update_actor(
      actor_->engine().pipeline(), samples,
      actor_->micro_batches(answers, config_.actor_micro_batches(), config_.longest_sequence()),
      update, grad_scale);
}

DataProto ActorRolloutRefWorker::update_actor(const DataProto& batch) {
  DataProto answer;
  std::int64_t number = 0;
  answer.meta_info = actor_->update(batch.size(), config_.actor_mini_batches(),
                                    [&](const std::vector<std::int64_t>& rows, double grad_scale) {
                                      return learn(batch.select_idxs(rows), grad_scale, number++);
                                    });
  return answer;
}

DataProto ActorRolloutRefWorker::update_weights(const DataProto& call) {
  weights_step_ = call.meta_info.at("weights_step").get<std::int64_t>();
  DataProto answer;
  answer.meta_info["reshard"] = as_json(hybrid_->rollout_mode());
  return answer;
}

DataProto ActorRolloutRefWorker::sleep_rollout(const DataProto&) {
  hybrid_->train_mode();
  return {};
}

DataProto ActorRolloutRefWorker::save_checkpoint(const DataProto& call) {
  return actor_->save_checkpoint(call);
}

DataProto ActorRolloutRefWorker::load_checkpoint(const DataProto& call) {
  return actor_->load_checkpoint(call);
}

}  // namespace ferry::trainer
