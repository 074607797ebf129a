#include "trainer/workers/critic_worker.h"

#include <utility>

#include "trainer/update/compute_values.h"
#include "trainer/update/update_critic.h"
#include "trainer/workers/batch_rows.h"
#include "trainer/workers/role.h"

namespace ferry::trainer {

CriticWorker::CriticWorker(models::World& world,
                           const PpoConfig& config,
                           std::shared_ptr<const converter::Checkpoint> origin,
                           std::int64_t total_steps)
    : MegatronWorker(world,
                     role_engine({.name = "critic",
                                  .origin = std::move(origin),
                                  .model = config.critic.model.path.empty() ? config.model
                                                                            : config.critic.model,
                                  .engine = config.critic.megatron,
                                  .ranks = config.critic.ranks,
                                  .value_head = true},
                                 config,
                                 config.critic.optim,
                                 total_steps),
                     offload_flags(config.critic.megatron)),
      config_(config) {}

DataProto CriticWorker::compute_values(const DataProto& batch) {
  const Awake awake(*this, {.param = true});
  const auto answers = answered_prompts_of(batch);
  const auto values = trainer::compute_values(
      engine().pipeline(/*forward_only=*/true), sequences_of(answers),
      micro_batches(answers, config_.critic_micro_batches(), config_.longest_sequence()));
  std::vector<at::Tensor> rows;
  for (std::size_t i = 0; i < answers.size(); ++i) rows.push_back(answer_of(answers[i], values[i]));
  return DataProto({{"values", response_column(rows, batch.tensor("responses").size(1))}});
}

std::map<std::string, double> CriticWorker::learn(const DataProto& batch, double grad_scale) {
  const auto answers = answered_prompts_of(batch);
  const auto mask = response_rows(batch.tensor("response_mask"), answers);
  const auto values = response_rows(batch.tensor("values"), answers);
  const auto returns = response_rows(batch.tensor("returns"), answers);
  std::vector<CriticSample> samples;
  for (std::size_t i = 0; i < answers.size(); ++i)
    samples.push_back({.tokens = answers[i].tokens,
                       .num_prompt_tokens = answers[i].num_prompt_tokens,
                       .response_mask = mask[i],
                       .values = values[i],
                       .returns = returns[i]});
  const auto aggregation = config_.critic_loss_aggregation();
  return trainer::update_critic(
      engine().pipeline(), samples,
      micro_batches(answers, config_.critic_micro_batches(), config_.longest_sequence()),
      {.loss = {.cliprange_value = config_.critic.cliprange_value,
                .loss_agg_mode = aggregation.loss_agg_mode},
       .loss_scale_factor = aggregation.loss_scale_factor},
      grad_scale);
}

DataProto CriticWorker::update_critic(const DataProto& batch) {
  DataProto answer;
  answer.meta_info = update(batch.size(), config_.critic_mini_batches(),
                            [&](const std::vector<std::int64_t>& rows, double grad_scale) {
                              return learn(batch.select_idxs(rows), grad_scale);
                            });
  return answer;
}

}  // namespace ferry::trainer
