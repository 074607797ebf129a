#include "trainer/update/compute_log_prob.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "trainer/engine/forward_sequences.h"
#include "trainer/update/mini_batch.h"

namespace ferry::trainer {

LogProbs compute_log_prob(const Pipeline& pipeline,
                          const RolloutBatch& batch,
                          const std::vector<Partition>& parts,
                          double temperature,
                          bool record_routes,
                          const VisualInputs& visual) {
  const TokenFunction say = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                const models::SequencePartition& pack) {
    const auto result = model.log_probs(hidden, pack.tokens_behind(1), temperature, pack.scored(),
                                        pack.sampling_mask());
    return at::stack({result.log_probs, result.entropy}, 1);
  };
  auto routes = rows_of(batch, batch.routed_experts);
  const bool records = routes.empty() && record_routes;
  const auto both = batch.responses_of(
      forward_sequences(pipeline, batch.sequences(), parts, say,
                        {.channels = 2,
                         .scored = scored_of(batch),
                         .masks = sampling_masks_of(batch),
                         .visual = visual,
                         .routed_experts = records || !routes.empty() ? &routes : nullptr}));
  return {.log_probs = both.select(1, 0).contiguous(),
          .entropys = both.select(1, 1).contiguous(),
          .routed_experts = records ? at::cat(routes) : at::Tensor()};
}

}  // namespace ferry::trainer
