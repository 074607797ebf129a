#include "trainer/update/update_critic.h"

#include "trainer/update/answer_batches.h"
#include "trainer/update/compute_values.h"

namespace ferry::trainer {

std::map<std::string, double> update_critic(const Pipeline& pipeline,
                                            const std::vector<CriticSample>& samples,
                                            const std::vector<Partition>& parts,
                                            const CriticUpdate& update,
                                            double grad_scale) {
  require_value_head(pipeline);
  const auto& mesh = pipeline.chunks.front()->mesh();
  const AnswerBatches batches(answered_prompts(samples), parts, mesh);
  if (batches.batch_num_tokens() == 0) return {};
  const GlobalBatchInfo info{.batch_num_tokens = batches.batch_num_tokens(),
                             .global_batch_size = batches.global_batch_size(),
                             .loss_scale_factor = update.loss_scale_factor};
  const LossFunction loss = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                std::size_t i) {
    const auto values = model.output(hidden).squeeze(1).to(at::kFloat);
    return value_loss({.vpreds = batches.rows(i, values),
                       .values = batches.rows(i, samples, &CriticSample::values),
                       .returns = batches.rows(i, samples, &CriticSample::returns),
                       .response_mask = batches.response_mask(i)},
                      update.loss, info);
  };
  return batches.run(pipeline, loss, grad_scale);
}

}  // namespace ferry::trainer
