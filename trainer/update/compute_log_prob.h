// Log-probabilities and entropies of the tokens of finished answers, through all stages of a
// pipeline (verl's compute_log_prob): what old, reference and new policies are compared by. In
// kBitwise they do not depend on the mesh, nor on how the sequences are cut into micro-batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"
#include "trainer/update/answer_batches.h"

namespace ferry::trainer {

// Of an answer of R tokens: [R], fp32, on the host.
struct AnswerLogProbs {
  at::Tensor log_probs{};
  at::Tensor entropys{};
};

// Called by all ranks of the mesh, with the prompts of their data parallel rank, of one token at
// least; answers may have none. `parts`: those of each micro-batch, every prompt in one, as many on
// all ranks. Logits are divided by the temperature, and tokens that an answer's sampling mask
// leaves out have probability 0; the prompts' tokens have none. The same on all
// ranks of a data parallel rank, in the order of `prompts`. `routed_experts`: as of
// SequenceOptions.
std::vector<AnswerLogProbs> compute_log_prob(const Pipeline& pipeline,
                                             const std::vector<AnsweredPrompt>& prompts,
                                             const std::vector<Partition>& parts,
                                             double temperature = 1,
                                             std::vector<at::Tensor>* routed_experts = nullptr);

}  // namespace ferry::trainer
