#include "trainer/update/update_critic.h"

#include "trainer/update/compute_values.h"
#include "trainer/update/mini_batch.h"

namespace ferry::trainer {

std::map<std::string, double> update_critic(const Pipeline& pipeline,
                                            const RolloutBatch& batch,
                                            const std::vector<Partition>& parts,
                                            const CriticUpdate& update,
                                            double grad_scale) {
  require_value_head(pipeline);
  const MiniBatch mini_batch(batch, parts, pipeline.chunks.front()->mesh(), update.visual);
  if (mini_batch.teaches_nothing()) return {};
  const auto info = mini_batch.info(update.loss_scale_factor);
  const LossFunction loss = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                std::size_t i) {
    const auto values = model.output(hidden).squeeze(1).to(at::kFloat);
    return value_loss({.vpreds = mini_batch.of_pack(i, values),
                       .values = mini_batch.of_column(i, batch.values),
                       .returns = mini_batch.of_column(i, batch.returns),
                       .response_mask = mini_batch.of_column(i, batch.response_mask)},
                      update.loss, info);
  };
  return mini_batch.run(pipeline, loss, grad_scale);
}

}  // namespace ferry::trainer
