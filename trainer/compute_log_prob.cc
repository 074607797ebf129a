#include "trainer/compute_log_prob.h"

#include <ATen/ops/stack.h>

#include "trainer/forward_sequences.h"

namespace ferry::trainer {

std::vector<SequenceLogProbs> compute_log_prob(const Pipeline& pipeline,
                                               const std::vector<at::Tensor>& sequences,
                                               const std::vector<Partition>& parts,
                                               double temperature,
                                               std::vector<at::Tensor>* routed_experts) {
  const TokenFunction say = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                const models::SequencePartition& batch) {
    const auto result = model.log_probs(hidden, batch.tokens_behind(1), temperature);
    return at::stack({result.log_probs, result.entropy}, 1);
  };
  std::vector<SequenceLogProbs> results;
  for (const auto& both :
       forward_sequences(pipeline, sequences, parts, 2, say, routed_experts)) {
    const auto behind = both.narrow(0, 0, both.size(0) - 1);
    results.push_back({.log_probs = behind.select(1, 0).contiguous(),
                       .entropys = behind.select(1, 1).contiguous()});
  }
  return results;
}

}  // namespace ferry::trainer
