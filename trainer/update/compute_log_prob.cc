#include "trainer/update/compute_log_prob.h"

#include <ATen/ops/stack.h>

#include "trainer/engine/forward_sequences.h"

namespace ferry::trainer {

std::vector<AnswerLogProbs> compute_log_prob(const Pipeline& pipeline,
                                             const std::vector<AnsweredPrompt>& prompts,
                                             const std::vector<Partition>& parts,
                                             double temperature,
                                             std::vector<at::Tensor>* routed_experts) {
  const TokenFunction say = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                const models::SequencePartition& batch) {
    const auto result = model.log_probs(hidden, batch.tokens_behind(1), temperature, batch.scored(),
                                        batch.sampling_mask());
    return at::stack({result.log_probs, result.entropy}, 1);
  };
  const auto both = forward_sequences(pipeline, sequences_of(prompts), parts, say,
                                      {.channels = 2,
                                       .scored = scored_of(prompts),
                                       .masks = sampling_masks_of(prompts),
                                       .routed_experts = routed_experts});
  std::vector<AnswerLogProbs> results;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const auto answer = answer_of(prompts[i], both[i]);
    results.push_back({.log_probs = answer.select(1, 0).contiguous(),
                       .entropys = answer.select(1, 1).contiguous()});
  }
  return results;
}

}  // namespace ferry::trainer
